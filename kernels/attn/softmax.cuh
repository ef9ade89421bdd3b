// Online softmax over key tiles (Milakov and Gimelshein 2018; FlashAttention-2) on accumulator
// fragments, in base 2: exp(softmax_scale * (s - m)) = exp2(s * score_scale - m * score_scale), one
// multiply-add and one exp2 per score.
#pragma once

#include <mcp/fragment.cuh>

#include "params.h"

namespace mcp::attn {

// The thread's two rows: maximum over the row, sum over the thread's own columns until `finish`.
struct OnlineSoftmax {
    float max[2];
    float sum[2];
    float start_max[2];  // of an earlier result over other keys, or -inf

    MCP_DEVICE void reset() {
        max[0] = max[1] = start_max[0] = start_max[1] = negative_infinity();
        sum[0] = sum[1] = 0.0f;
    }
    // An earlier result, as one key whose exponential is 1: one lane of the row has it.
    MCP_DEVICE void start(int half, float lse, float score_per_lse, bool has_it) {
        max[half] = start_max[half] = lse * score_per_lse;
        sum[half] = has_it && lse != negative_infinity() ? 1.0f : 0.0f;
    }
    MCP_DEVICE bool has_start(int half) const { return start_max[half] != negative_infinity(); }
    // Nothing was added to the earlier result; `row_sum` is that of all lanes.
    MCP_DEVICE bool is_as_started(int half, float row_sum, float sink) const {
        return has_start(half) && max[half] == start_max[half] && row_sum == 1.0f &&
               sink == negative_infinity();
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
            const float base = empty ? 0.0f : new_max;
            const float shift = base * score_scale;
            // Where the maximum stays, the factor is 1, and not only nearly.
            rescale[half] = ptx::exp2_approx(ptx::fma(max[half], score_scale, -shift));
            if (max[half] == new_max) rescale[half] = 1.0f;
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

// `sum` is that of all lanes. `sink` is a logit (natural log) that adds to the denominator, -inf
// for none. A row without keys gets factor 0, and the sink, or -inf, as lse.
MCP_DEVICE RowEnd finish_row(float max, float sum, float score_scale, float sink) {
    const float top = max * score_scale;
    const float sink_2 = sink * kLog2E;
    const float shift = ptx::max(top, sink_2);
    // Not on the maximum alone: it ignores nan, and a row of nan must not pass for an empty one.
    if (shift == negative_infinity() && sum == 0.0f) return {negative_infinity(), 0.0f};
    const float weight = ptx::exp2_approx(top - shift);
    const float total = ptx::fma(sum, weight, ptx::exp2_approx(sink_2 - shift));
    return {(shift + ptx::log2_approx(total)) * kLn2, weight / total};
}

}  // namespace mcp::attn
