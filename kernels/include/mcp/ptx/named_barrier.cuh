// Hardware barriers 1..15 of a CTA (0 is sync_threads).
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

// Waits until `kThreads` threads have arrived or wait here, the caller's warp included.
template <int kThreads>
MCP_DEVICE void named_barrier_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
// Arrives without waiting.
template <int kThreads>
MCP_DEVICE void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace mcp::ptx
