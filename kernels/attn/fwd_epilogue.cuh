// From the accumulator of one consumer to `out` and `lse` in global memory.
#pragma once

#include <mcp/fragment.cuh>

#include "params.h"
#include "softmax.cuh"
#include "store_row.cuh"
#include "tile_iter.cuh"

namespace mcp::attn {

// Normalises row `kHalf` of the thread's two and stores it if it belongs to the tile. The row is a
// template parameter since a loop over both is too large for the compiler to unroll, and
// accumulators indexed by a variable leave the registers. All lanes of the warp call together.
template <int kHalf, class T, int kSize>
MCP_DEVICE void store_row(const FwdParams& params,
                          const WorkItem& work,
                          FragmentPlace place,
                          const float (&out)[kSize],
                          RowEnd end) {
    const i32 row = place.row + 8 * kHalf;
    const bool valid = row < work.row0 + work.rows;
    RowMerge merge = {end.lse, {end.factor, 0.0f}};
    float* lse = params.lse + row * params.lse_row_stride + work.head * params.lse_head_stride;
    if (params.accumulate && valid) merge = merge_rows(end, *lse);
    ptx::sync_warp();  // all lanes of the row have read lse
    if (valid && place.column == 0) *lse = merge.lse;
    const i64 offset =
        row * params.out_row_stride + work.head * params.out_head_stride + place.column;
    if (params.out_is_float) {
        if (valid) store_row_f32(static_cast<float*>(params.out) + offset, out, kHalf, merge.scale);
    } else {
        store_row_16<T>(static_cast<u16*>(params.out) + offset, out, kHalf, merge.scale, valid);
    }
}

// Stores the 64 rows of a consumer; `place.row` is an absolute query row.
template <class T, int kSize>
MCP_DEVICE void store_rows(const FwdParams& params,
                           const WorkItem& work,
                           FragmentPlace place,
                           const float (&out)[kSize],
                           const OnlineSoftmax& softmax) {
    const float sink = params.sink == nullptr ? negative_infinity()
                                              : ptx::load_constant_f32(params.sink + work.head);
    const RowEnd upper = finish_row(softmax.max[0], softmax.sum[0], params.score_scale, sink);
    const RowEnd lower = finish_row(softmax.max[1], softmax.sum[1], params.score_scale, sink);
    store_row<0, T>(params, work, place, out, upper);
    store_row<1, T>(params, work, place, out, lower);
}

}  // namespace mcp::attn
