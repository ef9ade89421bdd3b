// PTX ISA, Parallel Synchronization and Communication Instructions: membar, fence.
#pragma once

#include <engine/access.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

MCP_DEVICE void fence_proxy_async() {
    emulator::fence_proxy_async();
}
// Global memory has no shadow: the emulator does not look for races there.
MCP_DEVICE void fence_mbarrier_init() {
    emulator::fence_mbarrier_init();
}
MCP_DEVICE void fence_gpu() {
    emulator::fence_gpu();
}

}  // namespace mcp::ptx
