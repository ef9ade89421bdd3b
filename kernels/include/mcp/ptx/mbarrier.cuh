// mbarrier objects: 8 bytes of shared memory, 8-byte aligned.
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

// `count` arrivals complete a phase. One thread calls, then fence_mbarrier_init and a CTA barrier.
MCP_DEVICE void mbarrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// One arrival; releases the caller's earlier memory accesses.
MCP_DEVICE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival, after the phase was made to wait for `num_bytes` of bulk copies as well.
MCP_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
}
// Whether the phase of this parity has completed; may suspend the thread for a while. True
// acquires.
MCP_DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

}  // namespace mcp::ptx
