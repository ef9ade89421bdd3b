// Bulk tensor copies between global and shared memory through 3-D tensor maps.
// Coordinates are in elements, innermost first; boxes may reach outside: loads fill zeros, stores
// skip. One thread issues a copy; shared addresses are 128-byte aligned (1024 with the 128-byte
// swizzle).
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

// How long the second-level cache should hold what a load brings.
constexpr u64 kEvictFirst = 0x12F0000000000000ull;
constexpr u64 kEvictLast = 0x14F0000000000000ull;

MCP_DEVICE void tma_prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Completes `box bytes` of transactions on `barrier`.
MCP_DEVICE void tma_load_3d(
    u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z, u64 cache_hint) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(cache_hint)
        : "memory");
}
MCP_DEVICE void tma_store_3d(const TensorMap* map, u32 source, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
            map),
        "r"(source), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// Adds the box to global memory, each element atomically, in no defined order.
MCP_DEVICE void tma_reduce_add_3d(const TensorMap* map, u32 source, int x, int y, int z) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];" ::"l"(map),
        "r"(source), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// The calling thread's stores and reductions since the last commit become one group.
MCP_DEVICE void tma_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most `kPending` of the thread's groups are still reading their shared memory.
template <int kPending>
MCP_DEVICE void tma_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until at most `kPending` of the thread's groups are incomplete: the others' writes are
// done.
template <int kPending>
MCP_DEVICE void tma_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace mcp::ptx
