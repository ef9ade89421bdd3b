// Parameters of the kernel that merges rows of partial results: one plain struct, the same bytes on
// the device, in the emulator and in the launcher's mirror. Strides count elements.
#pragma once

#include <mcp/types.h>

namespace mcp::rows {

// (out, lse) of row index[i] and head n becomes the merge of itself and of row i of the part: two
// softmax-weighted means over different keys. A row without keys is (0, -inf).
struct MergeRowsParams {
    float* out;  // [T, N, width]
    float* lse;  // [T, N] natural log
    const float* part_out;  // [num_rows, N, width]
    const float* part_lse;  // [num_rows, N]
    const i64* index;       // [num_rows] rows of out without repeats, or null: row i
    i64 out_row_stride, out_head_stride;
    i64 lse_row_stride, lse_head_stride;
    i64 part_out_row_stride, part_out_head_stride;
    i64 part_lse_row_stride, part_lse_head_stride;
    i32 num_rows, num_heads;
    i32 width;  // even
};

}  // namespace mcp::rows
