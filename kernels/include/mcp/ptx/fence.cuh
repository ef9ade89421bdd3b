// Orders between accesses of threads and of the asynchronous units. PTX ISA: membar, fence.
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

// Makes the caller's shared-memory accesses visible to wgmma and TMA (the async proxy), and the
// reverse. Every writing thread calls it, before the barrier that the issuing thread waits on.
MCP_DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Makes mbarrier_init visible to the async proxy.
MCP_DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace mcp::ptx
