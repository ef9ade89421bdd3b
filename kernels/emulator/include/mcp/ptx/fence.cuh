// PTX ISA, Parallel Synchronization and Communication Instructions: membar, fence.
#pragma once

#include <engine/access.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

MCP_DEVICE void fence_proxy_async() {
    emulator::fence_proxy_async();
}
MCP_DEVICE void fence_mbarrier_init() {
    emulator::fence_mbarrier_init();
}

}  // namespace mcp::ptx
