// The mask of a partial tile. The kernels know no mask types: only `row -> [first key, last key)`.
#pragma once

#include <mcp/fragment.cuh>

#include "tile_iter.cuh"

namespace mcp::attn {

// The lowest `count` bits, 0 <= count <= 32.
MCP_DEVICE u32 low_bits(i32 count) {
    return count < 32 ? (1u << count) - 1 : 0xffffffffu;
}

// How many of a thread's columns 0, 1, 8, 9, 16, 17, ... are below `end`; the thread has
// `kColumns`.
template <int kColumns>
MCP_DEVICE i32 columns_below(i32 end) {
    const i32 inside = ptx::min(ptx::max(end, 0), 4 * kColumns);
    return inside / 8 * 2 + ptx::min(inside % 8, 2);
}

// The thread's columns in [begin, end): bit 2 * i + e stands for column 8 * i + e.
template <int kColumns>
MCP_DEVICE u32 columns_between(i32 begin, i32 end) {
    static_assert(kColumns <= 32, "one bit per column of the thread");
    return low_bits(columns_below<kColumns>(end)) & ~low_bits(columns_below<kColumns>(begin));
}

// The thread's columns that row `row` sees, of those that start at `column` in the tile.
template <int kColumns>
MCP_DEVICE u32 visible_columns(const MaskBounds& tile, i32 row, i32 column) {
    const i32 first = tile.first + column;
    const i32 begin = ptx::max(tile.k0, row + tile.lo) - first;
    const i32 end = ptx::min(tile.k1, row + tile.hi + 1) - first;
    const u32 between = columns_between<kColumns>(begin, end);
    return row >= tile.q0 && row < tile.q1 ? between : 0;
}

// The transposed question, where a fragment's columns are the rows of the mask, the first of them
// `row`: which of them see column `column` of the tile. A row sees from row + lo to row + hi, so a
// column is seen from column - hi to column - lo.
template <int kRows>
MCP_DEVICE u32 rows_that_see(const MaskBounds& tile, i32 column, i32 row) {
    const i32 seen = tile.first + column;
    const i32 begin = ptx::max(tile.q0, seen - tile.hi) - row;
    const i32 end = ptx::min(tile.q1, seen - tile.lo + 1) - row;
    const u32 between = columns_between<kRows>(begin, end);
    return seen >= tile.k0 && seen < tile.k1 ? between : 0;
}

// The same of the thread's two rows; `place.row` is the absolute row of its first fragment row: a
// query, or, in the backward pass, which is transposed, a key. `tile` is that of the columns.
struct VisiblePairs {
    u32 row[2] = {0, 0};
};
template <int kColumns>
MCP_DEVICE VisiblePairs visible_pairs(const MaskBounds& tile, FragmentPlace place) {
    return {{visible_columns<kColumns>(tile, place.row, place.column),
             visible_columns<kColumns>(tile, place.row + 8, place.column)}};
}

// Pairs that may not see each other become `hidden`: -inf for scores, 0 for probabilities.
template <int kSize>
MCP_DEVICE void apply_mask(float (&values)[kSize], const VisiblePairs& visible, float hidden) {
    MCP_UNROLL
    for (int half = 0; half < 2; half++) {
        MCP_UNROLL
        for (int i = 0; i < kSize / 2; i++) {
            float& value = values[4 * (i / 2) + 2 * half + i % 2];
            if (!(visible.row[half] >> i & 1)) value = hidden;
        }
    }
}

}  // namespace mcp::attn
