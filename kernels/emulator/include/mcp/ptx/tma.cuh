// PTX ISA, Data Movement and Conversion Instructions: cp.async.bulk.tensor,
// cp.reduce.async.bulk.tensor, cp.async.bulk.commit_group, cp.async.bulk.wait_group, prefetch.
// Cache hints change nothing here.
#pragma once

#include <engine/tma.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

constexpr u64 kEvictFirst = 0x12F0000000000000ull;
constexpr u64 kEvictLast = 0x14F0000000000000ull;

MCP_DEVICE void tma_prefetch_map(const TensorMap* map) {
    emulator::tma_prefetch(map);
}
MCP_DEVICE void tma_load_3d(
    u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z, u64) {
    emulator::tma_load(destination, map, barrier, {3, {x, y, z}});
}
MCP_DEVICE void tma_store_3d(const TensorMap* map, u32 source, int x, int y, int z) {
    emulator::tma_store(map, source, {3, {x, y, z}}, false);
}
MCP_DEVICE void tma_reduce_add_3d(const TensorMap* map, u32 source, int x, int y, int z) {
    emulator::tma_store(map, source, {3, {x, y, z}}, true);
}
MCP_DEVICE void tma_commit_group() {
    emulator::bulk_commit();
}
template <int kPending>
MCP_DEVICE void tma_wait_group_read() {
    emulator::bulk_wait(kPending, true);
}
template <int kPending>
MCP_DEVICE void tma_wait_group() {
    emulator::bulk_wait(kPending, false);
}

}  // namespace mcp::ptx
