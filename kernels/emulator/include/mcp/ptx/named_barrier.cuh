// PTX ISA, Parallel Synchronization and Communication Instructions: bar, barrier.
#pragma once

#include <engine/collectives.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

template <int kThreads>
MCP_DEVICE void named_barrier_sync(int id) {
    emulator::bar_sync(id, kThreads);
}
template <int kThreads>
MCP_DEVICE void named_barrier_arrive(int id) {
    emulator::bar_arrive(id, kThreads);
}

}  // namespace mcp::ptx
