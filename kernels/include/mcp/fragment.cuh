// The accumulator of a warpgroup, D [64, 2 * kSize], as one thread sees it: rows `row` and `row +
// 8` of its warp's 16, and of every 8 columns the two that start at `column`. Register 4 * i + 2 *
// half + e is row + 8 * half, column + 8 * i + e.
#pragma once

#include <mcp/platform.cuh>

namespace mcp {

struct FragmentPlace {
    int row;     // the first of its two, 0..55 of the warpgroup's 64
    int column;  // 0, 2, 4, 6
};

MCP_DEVICE FragmentPlace fragment_place_of(int thread) {
    const int lane = thread % kWarpSize;
    return {thread / kWarpSize * 16 + lane / 4, 2 * (lane % 4)};
}
MCP_DEVICE FragmentPlace fragment_place() {
    return fragment_place_of(thread_in_warpgroup());
}
// The same, found anew: for the middle of a loop that has no register to spare.
MCP_DEVICE FragmentPlace fragment_place_anew() {
    return fragment_place_of(static_cast<int>(ptx::thread_index_anew()) % kWarpgroupSize);
}

template <int kSize>
MCP_DEVICE void fill(float (&d)[kSize], float value) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) d[i] = value;
}

// Multiplies each of the thread's two rows by its factor.
template <int kSize>
MCP_DEVICE void scale_rows(float (&d)[kSize], const float (&factor)[2]) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) d[i] *= factor[i / 2 % 2];
}

// Rounds to 16 bits; the result is operand A of a product that reduces over D's columns.
template <class T, int kSize>
MCP_DEVICE void pack(u32 (&packed)[kSize / 2], const float (&d)[kSize]) {
    MCP_UNROLL
    for (int i = 0; i < kSize / 2; i++) packed[i] = ptx::pack2<T>(d[2 * i], d[2 * i + 1]);
}

// Over the four lanes that hold a row.
MCP_DEVICE float row_max(float value) {
    value = ptx::max(value, ptx::shuffle_xor(value, 1));
    return ptx::max(value, ptx::shuffle_xor(value, 2));
}
MCP_DEVICE float row_sum(float value) {
    value += ptx::shuffle_xor(value, 1);
    return value + ptx::shuffle_xor(value, 2);
}

}  // namespace mcp
