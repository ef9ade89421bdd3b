// Attention dropout. A hash of a word of the query row and a word of the key says whether a pair is
// kept, as megatron_cp/attn/dropout.py defines it: the same in every pass, whoever computes it.
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

// Whether register `i` of the thread's fragment is kept; `word` is that of its column.
// kRowsAreKeys: in the transposed passes.
template <bool kRowsAreKeys>
MCP_DEVICE bool keeps(const RowWords& rows, int i, u32 word, i32 threshold) {
    const u32 row = rows.of[i / 2 % 2];
    return kRowsAreKeys ? is_kept(word, row, threshold) : is_kept(row, word, threshold);
}
MCP_DEVICE u32 word_of_column(const i32* words, int i) {
    return static_cast<u32>(ptx::load_constant_i32(words + 8 * (i / 4) + i % 2));
}

// The pairs of the thread that are kept, as VisiblePairs: of columns whose words begin at `words`.
template <int kColumns>
MCP_DEVICE VisiblePairs kept_pairs(const RowWords& rows, const i32* words, i32 threshold) {
    VisiblePairs kept;
    MCP_UNROLL
    for (int i = 0; i < kColumns; i++) {
        const u32 word = word_of_column(words, i / 2 * 4 + i % 2);
        MCP_UNROLL
        for (int half = 0; half < 2; half++) {
            const bool is = is_kept(rows.of[half], word, threshold);
            kept.row[half] |= static_cast<u32>(is) << i;
        }
    }
    return kept;
}

// What is kept is multiplied by 1 / (1 - rate), the rest becomes 0.
template <int kSize>
MCP_DEVICE void drop(float (&probs)[kSize], const VisiblePairs& kept, float scale) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) probs[i] *= scale;
    apply_mask(probs, kept, 0.0f);
}

// In the backward pass probabilities are wanted whole and dropped. One that is dropped becomes
// negative: no register is held for it until the gradients are there.
template <bool kRowsAreKeys, int kSize>
MCP_DEVICE void mark_dropped(float (&probs)[kSize],
                             const RowWords& rows,
                             const i32* words,
                             i32 threshold) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) {
        const bool kept = keeps<kRowsAreKeys>(rows, i, word_of_column(words, i), threshold);
        probs[i] = kept ? probs[i] : -probs[i];
    }
}
// What a value of a marked probability is after dropout; that of NaN is kept.
MCP_DEVICE float after_dropout(float marked, float value, float scale) {
    return marked <= 0.0f ? 0.0f : value * scale;
}
// dp, the gradient of what was dropped, -> ds, and marked probabilities -> dropped ones.
template <int kSize>
MCP_DEVICE void to_score_gradients_with_dropout(float (&marked)[kSize],
                                                float (&dp)[kSize],
                                                const f32x2 (&delta)[kSize / 4],
                                                float scale) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) {
        const float d = i % 2 ? delta[i / 4].y : delta[i / 4].x;
        dp[i] = (after_dropout(marked[i], dp[i], scale) - d) * ptx::abs(marked[i]);
        marked[i] = after_dropout(marked[i], marked[i], scale);
    }
}

}  // namespace mcp::attn
