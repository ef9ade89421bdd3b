// Online softmax over key tiles (Milakov and Gimelshein 2018; FlashAttention-2) on accumulator
// fragments, in base 2: exp(softmax_scale * (s - m)) = exp2(s * score_scale - m * score_scale), one
// multiply-add and one exp2 per score.
#pragma once

#include <mcp/fragment.cuh>

#include "params.h"
#include "store_row.cuh"

namespace mcp::attn {

// cap * tanh(softmax_scale * s / cap) with tanh x = 1 - 2 / (1 + e^2x): absolute error cap * 2^-22,
// where tanh.approx would leave cap * 2^-11.
template <int kSize>
MCP_DEVICE void cap_scores(float (&scores)[kSize], const FwdParams& params) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) {
        const float e = ptx::exp2_approx(scores[i] * params.cap_scale);
        scores[i] = ptx::fma(-2.0f * params.cap, ptx::rcp_approx(1.0f + e), params.cap);
    }
}

// The thread's two rows: maximum over the row, sum over the thread's own columns until `finish`.
struct OnlineSoftmax {
    float max[2];
    float sum[2];

    MCP_DEVICE void reset() {
        max[0] = max[1] = negative_infinity();
        sum[0] = sum[1] = 0.0f;
    }

    // Replaces the scores of a key tile by their exponentials and returns in `rescale` the factor
    // that brings earlier sums, and the output so far, to the new maximum. kMasked: a row may have
    // seen no key yet, and its maximum is -inf.
    template <bool kMasked, int kSize>
    MCP_DEVICE void step(float (&scores)[kSize], float score_scale, float (&rescale)[2]) {
        // Two chains per row: one would be as long as the row and wait for itself.
        float top[4] = {max[0], scores[1], max[1], scores[3]};
        MCP_UNROLL
        for (int i = 0; i < kSize; i++) {
            if (i != 1 && i != 3) top[i % 4] = ptx::max(top[i % 4], scores[i]);
        }
        MCP_UNROLL
        for (int half = 0; half < 2; half++) {
            const float new_max = row_max(ptx::max(top[2 * half], top[2 * half + 1]));
            const bool empty = kMasked && new_max == negative_infinity();
            const float shift = empty ? 0.0f : new_max * score_scale;
            rescale[half] = ptx::exp2_approx(ptx::fma(max[half], score_scale, -shift));
            max[half] = new_max;
            float tile_sum = 0.0f;
            MCP_UNROLL
            for (int i = 0; i < kSize / 4; i++) {
                MCP_UNROLL
                for (int e = 0; e < 2; e++) {
                    float& score = scores[4 * i + 2 * half + e];
                    score = ptx::exp2_approx(ptx::fma(score, score_scale, -shift));
                    tile_sum += score;
                }
            }
            sum[half] = ptx::fma(sum[half], rescale[half], tile_sum);
        }
    }
};

// A row's result: `lse` (natural log) and the factor that normalises its output.
struct RowEnd {
    float lse, factor;
};

// Joins the lanes' sums. `sink` is a logit (natural log) that adds to the denominator, -inf for
// none. A row without keys gets factor 0, and the sink, or -inf, as lse. All lanes of a row call
// together.
MCP_DEVICE RowEnd finish_row(float max, float sum, float score_scale, float sink) {
    sum = row_sum(sum);
    const float top = max * score_scale;
    const float sink_2 = sink * kLog2E;
    const float shift = ptx::max(top, sink_2);
    // Not on the maximum alone: it ignores nan, and a row of nan must not pass for an empty one.
    if (shift == negative_infinity() && sum == 0.0f) return {negative_infinity(), 0.0f};
    const float weight = ptx::exp2_approx(top - shift);
    const float total = ptx::fma(sum, weight, ptx::exp2_approx(sink_2 - shift));
    return {(shift + ptx::log2_approx(total)) * kLn2, weight / total};
}

// A row's result merged with an earlier partial one over other keys.
struct RowMerge {
    float lse;
    RowScale scale;
};

MCP_DEVICE RowMerge merge_rows(RowEnd row, float earlier_lse) {
    const float shift = ptx::max(row.lse, earlier_lse);
    if (shift == negative_infinity()) return {negative_infinity(), {0.0f, 0.0f}};
    const float mine = ptx::exp2_approx((row.lse - shift) * kLog2E);
    const float earlier = ptx::exp2_approx((earlier_lse - shift) * kLog2E);
    const float total = mine + earlier;
    return {shift + ptx::log2_approx(total) * kLn2, {row.factor * (mine / total), earlier / total}};
}

}  // namespace mcp::attn
