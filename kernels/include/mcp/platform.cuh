// Everything a kernel may use of the machine; no kernel source names an instruction, an intrinsic
// or a CUDA keyword outside these headers, so that the emulator can run the same source
// (include-path order decides whose mcp/ptx it sees).
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/fence.cuh>
#include <mcp/ptx/keywords.cuh>
#include <mcp/ptx/ldmatrix.cuh>
#include <mcp/ptx/math.cuh>
#include <mcp/ptx/mbarrier.cuh>
#include <mcp/ptx/memory.cuh>
#include <mcp/ptx/named_barrier.cuh>
#include <mcp/ptx/registers.cuh>
#include <mcp/ptx/stmatrix.cuh>
#include <mcp/ptx/thread.cuh>
#include <mcp/ptx/tma.cuh>
#include <mcp/ptx/wgmma.cuh>

namespace mcp {

constexpr int kWarpSize = 32;
constexpr int kWarpgroupSize = 128;
constexpr int kWarpsPerWarpgroup = kWarpgroupSize / kWarpSize;

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

MCP_DEVICE float negative_infinity() {
    return ptx::as_float(0xff800000u);
}
MCP_DEVICE float positive_infinity() {
    return ptx::as_float(0x7f800000u);
}

MCP_DEVICE int lane_index() {
    return static_cast<int>(ptx::thread_index()) % kWarpSize;
}
MCP_DEVICE int thread_in_warpgroup() {
    return static_cast<int>(ptx::thread_index()) % kWarpgroupSize;
}

// The same value in all lanes, and known to be so: the compiler keeps it, and what follows from it,
// in uniform registers. Without this the address arithmetic of matrix descriptors costs about 100
// instructions per step.
MCP_DEVICE u32 uniform(u32 value) {
    return ptx::shuffle(value, 0);
}
MCP_DEVICE i32 uniform(i32 value) {
    return ptx::shuffle(value, 0);
}

}  // namespace mcp
