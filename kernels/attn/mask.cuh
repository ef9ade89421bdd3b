// The mask of a partial tile. The kernels know no mask types: only `row -> [first key, last key)`.
#pragma once

#include <mcp/fragment.cuh>

#include "tile_iter.cuh"

namespace mcp::attn {

// Pairs that may not see each other become `hidden`: -inf for scores, 0 for probabilities.
// `place.row` is the absolute row of the thread's first fragment row: a query, or, in the backward
// pass, which is transposed, a key; `tiles` stands at the tile of the values' columns.
template <class Tiles, int kSize>
MCP_DEVICE void apply_mask(float (&values)[kSize],
                           const Tiles& tiles,
                           FragmentPlace place,
                           float hidden) {
    const i32 first = tiles.first() + place.column;
    MCP_UNROLL
    for (int half = 0; half < 2; half++) {
        const i32 r = place.row + 8 * half;
        const i32 begin = ptx::max(tiles.k0, r + tiles.lo) - first;
        const i32 end = ptx::min(tiles.k1, r + tiles.hi + 1) - first;
        const bool inside = r >= tiles.q0 && r < tiles.q1;
        // One unsigned comparison tests both bounds and the row.
        const u32 length = inside ? static_cast<u32>(ptx::max(end - begin, 0)) : 0u;
        MCP_UNROLL
        for (int i = 0; i < kSize / 4; i++) {
            MCP_UNROLL
            for (int e = 0; e < 2; e++) {
                if (static_cast<u32>(8 * i + e - begin) >= length) {
                    values[4 * i + 2 * half + e] = hidden;
                }
            }
        }
    }
}

}  // namespace mcp::attn
