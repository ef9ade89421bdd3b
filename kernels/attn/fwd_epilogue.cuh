// From the accumulator of one consumer to `out` and `lse` in global memory.
#pragma once

#include <mcp/fragment.cuh>

#include "params.h"
#include "softmax.cuh"
#include "tile_iter.cuh"

namespace mcp::attn {

// Adds weight * earlier to the pair (x, y), or leaves it: an earlier result of weight 0 may be anything.
MCP_DEVICE void add_earlier(float& x, float& y, f32x2 earlier, float weight) {
    if (weight != 0.0f) {
        x = ptx::fma(weight, earlier.x, x);
        y = ptx::fma(weight, earlier.y, y);
    }
}

// One row in fp32: four lanes write the 32 bytes of 8 columns, a whole sector.
template <int kSize>
MCP_DEVICE void store_row_f32(float* row, const float (&out)[kSize], int half, RowMerge merge) {
    MCP_UNROLL
    for (int i = 0; i < kSize / 4; i++) {
        f32x2* to = reinterpret_cast<f32x2*>(row + 8 * i);
        float x = out[4 * i + 2 * half] * merge.factor;
        float y = out[4 * i + 2 * half + 1] * merge.factor;
        if (merge.earlier_weight != 0.0f) add_earlier(x, y, *to, merge.earlier_weight);
        *to = {x, y};
    }
}

// One row in 16 bits. Two lanes exchange halves of two column groups, so that each writes 8 contiguous bytes and four
// lanes the 32 bytes of two groups, a whole sector. All lanes of the warp call; `valid` lanes store.
template <class T, int kSize>
MCP_DEVICE void store_row_16(u16* row, const float (&out)[kSize], int half, RowMerge merge, bool valid) {
    const bool odd = lane_index() % 2 != 0;
    MCP_UNROLL
    for (int i = 0; i < kSize / 4; i += 2) {
        u32 packed[2];
        MCP_UNROLL
        for (int group = 0; group < 2; group++) {
            float x = out[4 * (i + group) + 2 * half] * merge.factor;
            float y = out[4 * (i + group) + 2 * half + 1] * merge.factor;
            if (valid && merge.earlier_weight != 0.0f) {
                const u32 earlier = *reinterpret_cast<const u32*>(row + 8 * (i + group));
                add_earlier(x, y, ptx::unpack2<T>(earlier), merge.earlier_weight);
            }
            packed[group] = ptx::pack2<T>(x, y);
        }
        const u32 received = ptx::shuffle_xor(odd ? packed[0] : packed[1], 1);
        const u32x2 pair = odd ? u32x2{received, packed[1]} : u32x2{packed[0], received};
        // The even lane keeps group i, the odd lane takes group i + 1, whose columns begin 2 before its own.
        if (valid) *reinterpret_cast<u32x2*>(row + 8 * i + (odd ? 6 : 0)) = pair;
    }
}

// Normalises row `kHalf` of the thread's two and stores it if it belongs to the tile. The row is a template parameter
// since a loop over both is too large for the compiler to unroll, and accumulators indexed by a variable leave the
// registers. All lanes of the warp call together.
template <int kHalf, class T, int kSize>
MCP_DEVICE void store_row(const FwdParams& params,
                          const WorkItem& work,
                          FragmentPlace place,
                          const float (&out)[kSize],
                          RowEnd end) {
    const i32 row = place.row + 8 * kHalf;
    const bool valid = row < work.row0 + work.rows;
    RowMerge merge = {end.lse, end.factor, 0.0f};
    float* lse = params.lse + row * params.lse_row_stride + work.head * params.lse_head_stride;
    if (params.accumulate && valid) merge = merge_rows(end, *lse);
    ptx::sync_warp();  // all lanes of the row have read lse
    if (valid && place.column == 0) *lse = merge.lse;
    const i64 offset =
        row * params.out_row_stride + work.head * params.out_head_stride + place.column;
    if (params.out_is_float) {
        if (valid) store_row_f32(static_cast<float*>(params.out) + offset, out, kHalf, merge);
    } else {
        store_row_16<T>(static_cast<u16*>(params.out) + offset, out, kHalf, merge, valid);
    }
}

// Stores the 64 rows of a consumer; `place.row` is an absolute query row.
template <class T, int kSize>
MCP_DEVICE void store_rows(const FwdParams& params,
                           const WorkItem& work,
                           FragmentPlace place,
                           const float (&out)[kSize],
                           const OnlineSoftmax& softmax) {
    const float sink =
        params.sink == nullptr ? negative_infinity() : ptx::load_constant_f32(params.sink + work.head);
    const RowEnd upper = finish_row(softmax.max[0], softmax.sum[0], params.score_scale, sink);
    const RowEnd lower = finish_row(softmax.max[1], softmax.sum[1], params.score_scale, sink);
    store_row<0, T>(params, work, place, out, upper);
    store_row<1, T>(params, work, place, out, lower);
}

}  // namespace mcp::attn
