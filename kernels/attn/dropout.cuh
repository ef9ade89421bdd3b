// Attention dropout: which pairs are kept, a hash of a word of the query row and one of the key, as
// megatron_cp/attn/dropout.py defines it. Only that the hash is taken in another place differs
// between the passes: forward and dq have rows of queries, dk and dv rows of keys.
#pragma once

#include <mcp/fragment.cuh>

#include "mask.cuh"
#include "params.h"

namespace mcp::attn {

// The finaliser of MurmurHash3 (A. Appleby, public domain), the row's word added in place of its
// last shift.
MCP_DEVICE bool is_kept(u32 row_word, u32 key_word, i32 threshold) {
    u32 x = key_word ^ row_word;
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x = x * 0xc2b2ae35u + row_word;
    return static_cast<i32>(x) >= threshold;
}

MCP_DEVICE const i32* words_of_head(const DropoutParams& dropout, i32 head) {
    return dropout.row_words + static_cast<i64>(head) * dropout.padded_rows;
}

// The words of the thread's two rows; `words` is that of the first.
struct RowWords {
    u32 of[2];

    MCP_DEVICE void load(const i32* words) {
        of[0] = static_cast<u32>(ptx::load_constant_i32(words));
        of[1] = static_cast<u32>(ptx::load_constant_i32(words + 8));
    }
};

// The pairs of the thread that are kept, as VisiblePairs: of columns 0, 1, 8, 9, ..., whose words
// begin at `words`. kRowsAreKeys: in the transposed passes.
template <int kColumns, bool kRowsAreKeys>
MCP_DEVICE VisiblePairs kept_pairs(const RowWords& rows, const i32* words, i32 threshold) {
    VisiblePairs kept;
    MCP_UNROLL
    for (int i = 0; i < kColumns; i++) {
        const u32 word = static_cast<u32>(ptx::load_constant_i32(words + 8 * (i / 2) + i % 2));
        MCP_UNROLL
        for (int half = 0; half < 2; half++) {
            const u32 row = rows.of[half];
            const bool is =
                kRowsAreKeys ? is_kept(word, row, threshold) : is_kept(row, word, threshold);
            kept.row[half] |= static_cast<u32>(is) << i;
        }
    }
    return kept;
}

// What is kept is multiplied by 1 / (1 - rate), the rest becomes 0.
template <int kSize>
MCP_DEVICE void drop(float (&values)[kSize], const VisiblePairs& kept, float scale) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) values[i] *= scale;
    apply_mask(values, kept, 0.0f);
}

}  // namespace mcp::attn
