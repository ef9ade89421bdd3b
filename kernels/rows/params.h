// Parameters of the kernels that join results for the same rows: plain structs, the same bytes on
// the device, in the emulator and in the launcher's mirror. Strides count elements.
#pragma once

#include <mcp/types.h>

namespace mcp::rows {

// Row rows[i] gets parts parts[begins[i]] to parts[begins[i + 1] - 1], one after the other. Without
// them row i gets part i.
struct Joins {
    const i64* rows;    // [num_rows] without repeats, or null like the others
    const i64* begins;  // [num_rows + 1]
    const i64* parts;
    i64 num_rows;
};

struct AddRowsParams {
    Joins joins;
    float* total;       // [T, N, width]
    const float* part;  // [R, N, width]
    i64 total_row_stride, total_head_stride;
    i64 part_row_stride, part_head_stride;
    i32 num_heads;
    i32 width;
};

// (out, lse) of a row and head becomes the merge of itself and of its parts: softmax-weighted means
// over different keys. A row without keys is (0, -inf).
struct MergeRowsParams {
    Joins joins;
    float* out;  // [T, N, width]
    float* lse;  // [T, N] natural log
    const float* part_out;  // [R, N, width]
    const float* part_lse;  // [R, N]
    i64 out_row_stride, out_head_stride;
    i64 lse_row_stride, lse_head_stride;
    i64 part_out_row_stride, part_out_head_stride;
    i64 part_lse_row_stride, part_lse_head_stride;
    i32 num_heads;
    i32 width;  // even
};

}  // namespace mcp::rows
