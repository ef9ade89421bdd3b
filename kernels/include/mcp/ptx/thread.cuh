// Who am I, and what the lanes of a warp tell each other. PTX ISA: shfl, vote, bar.
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

MCP_DEVICE u32 thread_index() {
    return threadIdx.x;
}
// The same, read anew at every call: the compiler keeps no register of it.
MCP_DEVICE u32 thread_index_anew() {
    u32 index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
MCP_DEVICE u32 block_index() {
    return blockIdx.x;
}
MCP_DEVICE u32 num_blocks() {
    return gridDim.x;
}

// All threads of the CTA (named barrier 0).
MCP_DEVICE void sync_threads() {
    __syncthreads();
}
// All lanes of the warp; orders their memory accesses.
MCP_DEVICE void sync_warp() {
    __syncwarp();
}

// Value of `source_lane`. All 32 lanes call together.
MCP_DEVICE u32 shuffle(u32 value, int source_lane) {
    return __shfl_sync(0xffffffffu, value, source_lane);
}
MCP_DEVICE i32 shuffle(i32 value, int source_lane) {
    return __shfl_sync(0xffffffffu, value, source_lane);
}
// Value of the lane whose index differs by `lane_mask`. All 32 lanes call together.
MCP_DEVICE u32 shuffle_xor(u32 value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
MCP_DEVICE float shuffle_xor(float value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
// Whether `predicate` holds in any of the 32 lanes, which call together.
MCP_DEVICE bool any_lane(bool predicate) {
    return __any_sync(0xffffffffu, predicate) != 0;
}

}  // namespace mcp::ptx
