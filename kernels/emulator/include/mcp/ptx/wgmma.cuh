// PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: wgmma.
#pragma once

#include <engine/wgmma.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

MCP_DEVICE void wgmma_fence() {
    emulator::wgmma_fence();
}
MCP_DEVICE void wgmma_commit() {
    emulator::wgmma_commit();
}
template <int kPending>
MCP_DEVICE void wgmma_wait() {
    emulator::wgmma_wait(kPending);
}
// Tells a compiler something, and the machine nothing.
template <int kSize>
MCP_DEVICE void wgmma_pin(float (&)[kSize]) {}

template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

template <class T, int kN, int kTransA, int kTransB>
MCP_DEVICE void wgmma_ss(float (&d)[kN / 2], u64 a, u64 b, bool accumulate) {
    emulator::wgmma({kN, kIsBf16<T>, false, kTransA != 0, kTransB != 0, accumulate, a, b}, d,
                    nullptr);
}
template <class T, int kN, int kTransB>
MCP_DEVICE void wgmma_rs(float (&d)[kN / 2], const u32* a, u64 b, bool accumulate) {
    emulator::wgmma({kN, kIsBf16<T>, true, false, kTransB != 0, accumulate, 0, b}, d, a);
}

}  // namespace mcp::ptx
