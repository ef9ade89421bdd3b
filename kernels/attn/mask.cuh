// Scores of keys that a row may not see become -inf. The kernel knows no mask types: only `row -> [first key, last key)`.
#pragma once

#include <mcp/fragment.cuh>

#include "tile_iter.cuh"

namespace mcp::attn {

// `place.row` is the absolute query row of the thread's first fragment row.
template <int kBlockN>
MCP_DEVICE void apply_mask(float (&scores)[kBlockN / 2], const KeyTiles<kBlockN>& keys, FragmentPlace place) {
    const i32 first_key = keys.first_key() + place.column;
    MCP_UNROLL
    for (int half = 0; half < 2; half++) {
        const i32 r = place.row + 8 * half;
        const i32 begin = ptx::max(keys.k0, r + keys.lo) - first_key;
        const i32 end = ptx::min(keys.k1, r + keys.hi + 1) - first_key;
        const bool inside = r >= keys.q0 && r < keys.q1;
        // One unsigned comparison tests both bounds and the row.
        const u32 length = inside ? static_cast<u32>(ptx::max(end - begin, 0)) : 0u;
        MCP_UNROLL
        for (int i = 0; i < kBlockN / 8; i++) {
            MCP_UNROLL
            for (int e = 0; e < 2; e++) {
                if (static_cast<u32>(8 * i + e - begin) >= length) {
                    scores[4 * i + 2 * half + e] = negative_infinity();
                }
            }
        }
    }
}

}  // namespace mcp::attn
