// The backward pass element by element, on transposed fragments: rows are keys, columns queries.
// `lse` and `delta` are shared addresses of the thread's first column; a thread has columns 8 * i
// and 8 * i + 1 from there.
#pragma once

#include <mcp/fragment.cuh>

#include "params.h"
#include "store_row.cuh"

namespace mcp::attn {

// With p = exp2(score_scale * x - lse) for the capped score x = cap * tanh: scores become x, and dp
// the gradient of the uncapped score without its factor p: (dp - delta) * (1 - tanh^2), where 1 -
// tanh^2 = 4 r (1 - r).
template <int kSize>
MCP_DEVICE void cap_scores(float (&scores)[kSize],
                           float (&dp)[kSize],
                           u32 delta,
                           const BwdParams& params) {
    MCP_UNROLL
    for (int i = 0; i < kSize / 4; i++) {
        const f32x2 d = ptx::load_shared_f32x2(delta + 32 * i);
        MCP_UNROLL
        for (int e = 0; e < 4; e++) {
            const float r =
                ptx::rcp_approx(1.0f + ptx::exp2_approx(scores[4 * i + e] * params.cap_scale));
            scores[4 * i + e] = ptx::fma(-2.0f * params.cap, r, params.cap);
            dp[4 * i + e] = (dp[4 * i + e] - (e % 2 ? d.y : d.x)) * (4.0f * r * (1.0f - r));
        }
    }
}

// Row statistics of the thread's columns, lse or delta.
template <int kSize>
MCP_DEVICE void load_row_stats(f32x2 (&stats)[kSize], u32 address) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) stats[i] = ptx::load_shared_f32x2(address + 32 * i);
}

// Scores, uncapped or capped, -> probabilities.
template <int kSize>
MCP_DEVICE void to_probabilities(float (&scores)[kSize],
                                 const f32x2 (&lse)[kSize / 4],
                                 float score_scale) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) {
        const float l = i % 2 ? lse[i / 4].y : lse[i / 4].x;
        scores[i] = ptx::exp2_approx(ptx::fma(scores[i], score_scale, -l));
    }
}

// dp -> ds = p * (dp - delta), or p * dp if delta is in dp already. dp is finite outside the mask
// too: rows that no pair uses have been cleared.
template <bool kSubtractDelta, int kSize>
MCP_DEVICE void to_score_gradients(const float (&probs)[kSize], float (&dp)[kSize], u32 delta) {
    MCP_UNROLL
    for (int i = 0; i < kSize / 4; i++) {
        f32x2 d = {0.0f, 0.0f};
        if constexpr (kSubtractDelta) d = ptx::load_shared_f32x2(delta + 32 * i);
        MCP_UNROLL
        for (int e = 0; e < 4; e++) {
            dp[4 * i + e] = probs[4 * i + e] * (dp[4 * i + e] - (e % 2 ? d.y : d.x));
        }
    }
}

// Gradient of one row of keys or values, fp32 or 16 bits. All lanes of the warp call; `valid` lanes
// store.
template <int kHalf, class T, int kSize>
MCP_DEVICE void store_gradient(
    void* gradient, i64 offset, bool is_float, const float (&d)[kSize], float factor, bool valid) {
    const RowScale scale = {factor, 0.0f};
    if (is_float) {
        if (valid) store_row_f32(static_cast<float*>(gradient) + offset, d, kHalf, scale);
    } else {
        store_row_16<T>(static_cast<u16*>(gradient) + offset, d, kHalf, scale, valid);
    }
}

}  // namespace mcp::attn
