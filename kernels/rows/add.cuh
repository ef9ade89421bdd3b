// Adds rows to rows: a warp per row, head and 128 columns, the total read and written once.
#pragma once

#include "joins.cuh"

namespace mcp::rows {

constexpr int kColumns = 4;  // of a lane
constexpr int kAdded = kColumns * kWarpSize;

MCP_DEVICE void add_columns(const AddRowsParams& params, i64 index, int head, int first) {
    const JoinedRow joined(params.joins, index);
    const int column = first + lane_index();
    const auto is_mine = [&](int i) { return column + i * kWarpSize < params.width; };
    float* total = params.total + joined.row * params.total_row_stride +
                   head * params.total_head_stride + column;
    float sum[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
        if (is_mine(i)) sum[i] = ptx::load_global<float>(total + i * kWarpSize);
    }
    for (i64 place = joined.begin; place < joined.end; ++place) {
        const float* part = params.part + joined.part(place) * params.part_row_stride +
                            head * params.part_head_stride + column;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            if (is_mine(i)) sum[i] += ptx::load_global<float>(part + i * kWarpSize);
        }
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
        if (is_mine(i)) ptx::store_global<float>(total + i * kWarpSize, sum[i]);
    }
}

MCP_DEVICE void add_rows(const AddRowsParams& params) {
    const int pieces = (params.width + kAdded - 1) / kAdded;
    for_each_item(params.joins.num_rows, pieces * params.num_heads, [&](i64 index, int item) {
        add_columns(params, index, item / pieces, item % pieces * kAdded);
    });
}

}  // namespace mcp::rows
