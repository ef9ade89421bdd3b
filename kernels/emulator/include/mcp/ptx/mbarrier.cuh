// PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier.
#pragma once

#include <engine/mbarrier.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

MCP_DEVICE void mbarrier_init(u32 barrier, u32 count) {
    emulator::mbarrier_init(barrier, count);
}
MCP_DEVICE void mbarrier_arrive(u32 barrier) {
    emulator::mbarrier_arrive(barrier, 0, false);
}
MCP_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 num_bytes) {
    emulator::mbarrier_arrive(barrier, num_bytes, true);
}
MCP_DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
    return emulator::mbarrier_try_wait(barrier, parity);
}

}  // namespace mcp::ptx
