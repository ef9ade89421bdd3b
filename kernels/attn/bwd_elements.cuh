// The backward pass element by element, on transposed fragments: rows are keys, columns queries.
// A thread has columns 8 * i and 8 * i + 1 from its first.
#pragma once

#include <mcp/fragment.cuh>

#include "params.h"
#include "softcap.cuh"
#include "store_row.cuh"

namespace mcp::attn {

// Statistics of the thread's columns, lse or delta; `address` is that of its first. Loaded before a
// wait for products, which hides the latency.
template <int kSize>
MCP_DEVICE void load_row_stats(f32x2 (&stats)[kSize], u32 address) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) stats[i] = ptx::load_shared_f32x2(address + 32 * i);
}

template <int kSize>
MCP_DEVICE void subtract_delta(float (&dp)[kSize], const f32x2 (&delta)[kSize / 4]) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) dp[i] -= i % 2 ? delta[i / 4].y : delta[i / 4].x;
}

// Raw scores -> probabilities, and dp -> (dp - delta) * slope of the cap; `lse` and `delta` are
// addresses of the first. Rows that no pair uses have been cleared: no NaN is where no pair is.
template <int kSize>
MCP_DEVICE void to_capped_probabilities(
    float (&scores)[kSize], float (&dp)[kSize], u32 lse, u32 delta, const BwdParams& params) {
    f32x2 stats[kSize / 4];
    load_row_stats(stats, delta);
    subtract_delta(dp, stats);
    MCP_UNROLL
    for (int group = 0; group < kSize / kCapGroup; group++) {
        float r[kCapGroup];
        cap_reciprocals<true>(r, scores, group, params.cap_scale);
        MCP_UNROLL
        for (int i = 0; i < kCapGroup; i++) {
            const int at = cap_register(group, i);
            scores[at] = r[i];
            dp[at] *= 4.0f * r[i] * (1.0f - r[i]);
        }
    }
    load_row_stats(stats, lse);
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) {
        const float l = i % 2 ? stats[i / 4].y : stats[i / 4].x;
        scores[i] = ptx::exp2_approx(ptx::fma(-2.0f * params.cap, scores[i], params.cap - l));
    }
}

// Scores become capped ones, and `slopes` the slopes of the cap there.
template <int kSize>
MCP_DEVICE void cap_scores(float (&scores)[kSize],
                           float (&slopes)[kSize],
                           const BwdParams& params) {
    MCP_UNROLL
    for (int group = 0; group < kSize / kCapGroup; group++) {
        float r[kCapGroup];
        cap_reciprocals<true>(r, scores, group, params.cap_scale);
        MCP_UNROLL
        for (int i = 0; i < kCapGroup; i++) {
            const int at = cap_register(group, i);
            scores[at] = ptx::fma(-2.0f * params.cap, r[i], params.cap);
            slopes[at] = 4.0f * r[i] * (1.0f - r[i]);
        }
    }
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

// The same address, known once most of the probabilities are: none of them is `never`. ptxas
// would move a load, and the wait behind it, above the exponentials.
template <class Address, int kSize>
MCP_DEVICE Address hold_address(Address address, const float (&probs)[kSize], float never = -1.0f) {
    return address + (probs[kSize * 5 / 8] == never ? 16 : 0);
}

// dp - delta -> ds, given the probabilities (or with them the slopes of the cap). It is finite
// outside the mask too: rows that no pair uses have been cleared.
template <int kSize>
MCP_DEVICE void to_score_gradients(const float (&probs)[kSize], float (&dp)[kSize]) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) dp[i] *= probs[i];
}

// Gradient of one row of keys or values, fp32, perhaps added to what is there, or 16 bits. All
// lanes of the warp call; `valid` lanes store.
template <int kHalf, class T, int kSize>
MCP_DEVICE void store_gradient(const BwdParams& params,
                               void* gradient,
                               i64 offset,
                               const float (&d)[kSize],
                               float factor,
                               bool valid) {
    if (params.store != kStore16Bits) {
        const bool adds = params.store == kAddFloats;
        float* const row = static_cast<float*>(gradient) + offset;
        if (valid) store_or_add_row_f32(row, d, kHalf, factor, adds);
    } else {
        store_row_16<T>(static_cast<u16*>(gradient) + offset, d, kHalf, factor, valid);
    }
}

// The same where columns are keys, of which `num_keys` from the thread's first on exist: one of the
// thread's two columns of the gradient, and those that lie 64 and 128 on. `offset` is that of the
// first key's.
template <int kHalf, class T, int kChunks, int kSize>
MCP_DEVICE void store_transposed_gradient(const BwdParams& params,
                                          void* gradient,
                                          i64 offset,
                                          i64 key_stride,
                                          const float (&d)[kChunks][kSize],
                                          float factor,
                                          i32 num_keys) {
    float* const floats = static_cast<float*>(gradient) + offset;
    if (params.store == kAddFloats) {
        store_column_f32<true>(floats, key_stride, d, kHalf, factor, num_keys);
    } else if (params.store == kStoreFloats) {
        store_column_f32<false>(floats, key_stride, d, kHalf, factor, num_keys);
    } else {
        u16* const first = static_cast<u16*>(gradient) + offset;
        store_column_16<T>(first, key_stride, d, kHalf, factor, num_keys);
    }
}

}  // namespace mcp::attn
