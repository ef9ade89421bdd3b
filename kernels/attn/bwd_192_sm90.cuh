// Attention backward for Hopper, head dims 192 and 256: all three gradients from tiles of 96 or 80
// keys, five products where bwd_wide_sm90.cuh and bwd_dq_sm90.cuh take seven. As in the first of them
// both consumers work on all keys of the tile, and each owns one gradient. So many keys are no
// multiple of a product's 64 rows, and gradients are transposed: rows are their columns, and columns
// are keys.
//
//     values   S = Q K'     P = exp2(S - lse)       dV' += dO' P
//     keys     dP = dO V'   dS = P (dP - delta)     dK' += Q' dS     dQ = dS K
//     storer   dQ: fp32 reduce-add to global memory, 64 columns at a time
//
// P is written twice: in the inputs' type for dV', and in fp16, from which keys make dS in its place,
// so that dS is rounded once as good as where P stays in registers. Both lie as [keys, queries]. For
// dQ, dS is operand A in registers. Nobody meets: values may be a tile ahead.
// Before P was written twice, this ran on an H200 at 192 (h200_second_2026-11-27.md). At 256 it never
// ran.
#pragma once

#include <mcp/fragment.cuh>
#include <mcp/gemm.cuh>
#include <mcp/mailbox.cuh>

#include "bwd_elements.cuh"
#include "bwd_load_store.cuh"
#include "bwd_shared.cuh"
#include "bwd_work.cuh"
#include "mask.cuh"
#include "params.h"
#include "tile_iter.cuh"
#include "traits.h"

namespace mcp::attn {

// Rings as in BwdShared, but
//   probs    values: every thread          1 lane per warp of values   P in the inputs' type
//   weights  values: every thread          1 lane per warp of keys     P in fp16, in whose place keys
//                                                                      write dS
//   dq       keys: every thread            1 thread of the storer      64 columns of the dq tile
// Named barrier 1, 128 threads: all of keys have written dS.
template <class Traits>
struct Bwd192Shared : BwdRooms<Traits> {
    using Rooms = BwdRooms<Traits>;
    using Scores = Panels<Traits::kBlockN, Traits::kBlockM>;
    using QueryStages = Ring<Traits::kStages>;
    using DoutStages = Ring<Traits::kDoutStages>;
    using WeightStages = Ring<Traits::kWeightStages>;
    using DqStages = Ring<Traits::kDqStages>;
    using Rooms::base;
    static_assert(Scores::kBytes == Traits::kScoreBytes, "traits.h and panels.cuh disagree");

    Ring<1> key_ring, mail_ring, prob_ring;
    QueryStages query_ring;
    DoutStages dout_ring;
    WeightStages weight_ring;
    DqStages dq_ring;
    u32 landed;

    MCP_DEVICE Bwd192Shared() {
        key_ring.barriers = base + Traits::kBarriersAt;
        mail_ring.barriers = key_ring.barriers + Ring<1>::kBytes;
        prob_ring.barriers = mail_ring.barriers + Ring<1>::kBytes;
        query_ring.barriers = prob_ring.barriers + Ring<1>::kBytes;
        dout_ring.barriers = query_ring.barriers + QueryStages::kBytes;
        weight_ring.barriers = dout_ring.barriers + DoutStages::kBytes;
        dq_ring.barriers = weight_ring.barriers + WeightStages::kBytes;
        landed = dq_ring.barriers + DqStages::kBytes;
        static_assert(3 * Ring<1>::kBytes + QueryStages::kBytes + DoutStages::kBytes +
                              WeightStages::kBytes + DqStages::kBytes + 8 ==
                          8 * Traits::kNumBarriers,
                      "");
    }

    MCP_DEVICE Scores probs() const { return {base + Traits::kProbsAt}; }
    MCP_DEVICE Scores weights(int stage) const {
        return {base + Traits::kWeightsAt + stage * Traits::kScoreBytes};
    }
    MCP_DEVICE u32 dq(int stage) const { return base + Traits::kDqAt + stage * Traits::kDqBytes; }

    // One thread; a CTA barrier must follow.
    MCP_DEVICE void init_barriers() const {
        key_ring.init(Traits::kConsumers);
        query_ring.init(Rooms::kConsumerWarps);
        dout_ring.init(Rooms::kConsumerWarps);
        prob_ring.init(kWarpsPerWarpgroup, kWarpgroupSize);
        weight_ring.init(kWarpsPerWarpgroup, kWarpgroupSize);
        dq_ring.init(1, kWarpgroupSize);
        mail_ring.init(Rooms::kConsumerWarps + 1);
        ptx::mbarrier_init(landed, 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();
    }
};

// Probabilities are held times 2^14: then fp16 has eleven bits of all above 4e-9, and all are below
// 4, whatever rounding does.
constexpr float kProbExponent = 14.0f, kProbScale = 16384.0f;

// What both consumers have: where they stand.
template <class Traits>
struct Bwd192Consumer {
    using T = typename Traits::T;
    using Shared = Bwd192Shared<Traits>;
    using Queries = QueryTiles<Traits::kBlockM>;
    static constexpr int kScores = Traits::kBlockN / 2;
    static constexpr int kParts = Traits::kBlockN / 16;  // of 16 keys, 8 scores of a thread
    static constexpr int kQueriesOfTile = Traits::kBlockM;
    using Matrix = float[kScores];  // [64, keys]: scores, or 64 columns of a gradient

    const BwdParams& params;
    const Shared& shared;
    RingPosition<Traits::kStages> queries_at;
    RingPosition<Traits::kDoutStages> dout_at;
    RingPosition<Traits::kWeightStages> weights_at;
    RingPosition<1> keys_at, mail_at;

    MCP_DEVICE Bwd192Consumer(const BwdParams& params, const Shared& shared)
        : params(params), shared(shared) {}

    // Each warp for itself: it has read what threads read, and its products have ended.
    template <int kStages>
    MCP_DEVICE void release(Ring<kStages> ring, RingPosition<kStages> stage) const {
        ptx::sync_warp();
        if (lane_index() == 0) ring.release(stage);
    }

    // After all threads of the warpgroup have written what its products read.
    template <int kStages>
    MCP_DEVICE void hand_over(Ring<kStages> ring, RingPosition<kStages> stage) const {
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(ring.full(stage));
    }

    // Row statistics, lse or delta, of the thread's two rows.
    MCP_DEVICE static void load_row_pair(float (&stats)[2], u32 address) {
        const u32 first = address + 4 * fragment_place().row;
        stats[0] = ptx::load_shared_f32(first);
        stats[1] = ptx::load_shared_f32(first + 32);
    }

    // Columns are keys.
    MCP_DEVICE FragmentPlace place_of(const WorkItem& work) const {
        FragmentPlace place = fragment_place();
        place.column += work.row0;
        return place;
    }
};

// Makes the probabilities, and owns dv.
template <class Traits>
struct ValueGradients : Bwd192Consumer<Traits> {
    using Base = Bwd192Consumer<Traits>;
    using Base::params, Base::shared, Base::queries_at, Base::dout_at, Base::weights_at;
    using Base::kParts, Base::kScores;
    using typename Base::Matrix, typename Base::Queries, typename Base::T;
    static constexpr int kChunks = Traits::kValueDim / 64;

    Matrix dv[kChunks];
    RingPosition<1> probs_at;

    using Base::Base;

    MCP_DEVICE void begin() {
        MCP_UNROLL
        for (int c = 0; c < kChunks; c++) fill(dv[c], 0.0f);
    }
    MCP_DEVICE void visit_tiles(const WorkItem& work, FragmentPlace place) {
        shared.key_ring.wait_full(this->keys_at);
        visit_queries(*this, work, place);
        release_keys(*this);
    }
    MCP_DEVICE void enter_head(i32) {}

    template <bool kMasked>
    MCP_DEVICE void visit(const Queries& queries, FragmentPlace place, i32) {
        Matrix scores;
        float lse[2];
        shared.query_ring.wait_full(queries_at);
        issue_a_bt<T>(scores, shared.queries(queries_at.stage), 0, shared.keys());
        this->load_row_pair(lse, shared.lse(queries_at.stage));
        VisiblePairs visible;
        if constexpr (kMasked) visible = visible_keys(queries.bounds(), place);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(scores);
        this->release(shared.query_ring, queries_at);
        const u32 weights = transposed_address(shared.weights(weights_at.stage));
        shared.weight_ring.wait_empty(weights_at);
        MCP_UNROLL
        for (int part = 0; part < kParts; part++) {
            make_probabilities<kMasked>(scores, part, lse, visible);
            u32 packed[4];
            MCP_UNROLL
            for (int i = 0; i < 4; i++) {
                const int first = 8 * part + 2 * i;
                packed[i] = ptx::pack2<fp16>(scores[first], scores[first + 1]);
            }
            store_transposed_part(weights + part * kTransposedStep, packed);
        }
        ptx::mbarrier_arrive(shared.weight_ring.full(weights_at));
        u32 probs_16[kScores / 2];
        pack<T>(probs_16, scores);
        shared.prob_ring.wait_empty(probs_at);
        store_transposed(shared.probs(), 0, 0, probs_16);
        this->hand_over(shared.prob_ring, probs_at);
        shared.dout_ring.wait_full(dout_at);
        shared.prob_ring.wait_full(probs_at);
        MCP_UNROLL
        for (int c = 0; c < kChunks; c++) {
            issue_at_bt<T>(dv[c], shared.dout(dout_at.stage), c, shared.probs());
        }
        ptx::wgmma_wait<0>();
        MCP_UNROLL
        for (int c = 0; c < kChunks; c++) ptx::wgmma_pin(dv[c]);
        this->release(shared.dout_ring, dout_at);
        this->release(shared.prob_ring, probs_at);
        queries_at.advance();
        dout_at.advance();
        probs_at.advance();
        weights_at.advance();
    }

    // Scores of 16 keys become probabilities, times kProbScale.
    template <bool kMasked>
    MCP_DEVICE void make_probabilities(Matrix& scores,
                                       int part,
                                       const float (&lse)[2],
                                       const VisiblePairs& visible) const {
        float probs[8];
        MCP_UNROLL
        for (int i = 0; i < 8; i++) {
            const float shifted_lse = lse[i / 2 % 2] - kProbExponent;
            probs[i] = ptx::exp2_approx(
                ptx::fma(scores[8 * part + i], params.score_scale, -shifted_lse));
        }
        if constexpr (kMasked) {
            apply_mask(probs, {{visible.row[0] >> 4 * part, visible.row[1] >> 4 * part}}, 0.0f);
        }
        MCP_UNROLL
        for (int i = 0; i < 8; i++) scores[8 * part + i] = probs[i];
    }

    MCP_DEVICE static VisiblePairs visible_keys(const MaskBounds& tile, FragmentPlace place) {
        return {{rows_that_see<kScores / 2>(tile, place.row, place.column),
                 rows_that_see<kScores / 2>(tile, place.row + 8, place.column)}};
    }

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem& work, FragmentPlace place) const {
        const i64 to = place.column * params.dv_row_stride +
                       kv_head_of(params, work) * params.dv_head_stride + place.row + 8 * kHalf;
        const i32 num_keys = work.row0 + work.rows - place.column;
        store_transposed_gradient<kHalf, T>(params, params.dv, to, params.dv_row_stride, dv,
                                            1.0f / kProbScale, num_keys);
    }
};

// Makes the gradients of the scores, owns dk, and makes dq.
template <class Traits>
struct KeyGradients : Bwd192Consumer<Traits> {
    using Base = Bwd192Consumer<Traits>;
    using Base::params, Base::shared, Base::queries_at, Base::dout_at, Base::weights_at;
    using Base::kParts, Base::kScores;
    using typename Base::Matrix, typename Base::T;
    static constexpr int kChunks = Traits::kHeadDim / 64;

    RingPosition<Traits::kDqStages> dq_at;
    Matrix dk[kChunks];

    using Base::Base;

    MCP_DEVICE void begin() {
        MCP_UNROLL
        for (int c = 0; c < kChunks; c++) fill(dk[c], 0.0f);
    }
    MCP_DEVICE void visit_tiles(const WorkItem& work, FragmentPlace) {
        shared.key_ring.wait_full(this->keys_at);
        MCP_NO_UNROLL
        for (i32 left = num_visits<Traits::kBlockM>(params, work); left > 0; left--) visit();
        release_keys(*this);
    }

    MCP_DEVICE void visit() {
        Matrix dp;
        float delta[2];
        u32 weights_16[kScores / 2], ds_16[kScores / 2];
        shared.dout_ring.wait_full(dout_at);
        issue_a_bt<T>(dp, shared.dout(dout_at.stage), 0, shared.values());
        this->load_row_pair(delta, shared.delta(dout_at.stage));
        const auto weights = shared.weights(weights_at.stage);
        const u32 address = transposed_address(weights);
        shared.weight_ring.wait_full(weights_at);
        constexpr int kAhead = Traits::kPartsAhead;
        MCP_UNROLL
        for (int part = 0; part < kAhead; part++) {
            load_transposed_part(address + part * kTransposedStep, weights_16 + 4 * part);
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dp);
        this->release(shared.dout_ring, dout_at);
        MCP_UNROLL
        for (int part = 0; part < kParts; part++) {
            const int next = part + kAhead;
            if (next < kParts) load_transposed_part(address + next * kTransposedStep, weights_16 + 4 * next);
            to_score_gradients(ds_16, weights_16, dp, delta, part);
        }
        store_transposed(weights, 0, 0, ds_16);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync<kWarpgroupSize>(1);
        shared.query_ring.wait_full(queries_at);
        MCP_UNROLL
        for (int c = 0; c < kChunks; c++) {
            // These columns of dq leave under the product of dk.
            float dq[32];
            issue_p_b<T, false>(dq, ds_16, shared.keys(), c);
            issue_at_bt<T>(dk[c], shared.queries(queries_at.stage), c, weights);
            ptx::wgmma_wait<1>();
            ptx::wgmma_pin(dq);
            hand_over_dq(dq);
        }
        ptx::wgmma_wait<0>();
        MCP_UNROLL
        for (int c = 0; c < kChunks; c++) ptx::wgmma_pin(dk[c]);
        this->release(shared.query_ring, queries_at);
        this->release(shared.weight_ring, weights_at);
        queries_at.advance();
        dout_at.advance();
        weights_at.advance();
    }

    MCP_DEVICE static void to_score_gradients(u32 (&ds_16)[kScores / 2],
                                              const u32 (&weights_16)[kScores / 2],
                                              const Matrix& dp,
                                              const float (&delta)[2],
                                              int part) {
        constexpr float kUnit = 1.0f / kProbScale;
        MCP_UNROLL
        for (int i = 4 * part; i < 4 * part + 4; i++) {
            const f32x2 weight = ptx::unpack2<fp16>(weights_16[i]);
            const float shift = -delta[i % 2] * kUnit;
            ds_16[i] = ptx::pack2<T>(ptx::fma(dp[2 * i], kUnit, shift) * weight.x,
                                     ptx::fma(dp[2 * i + 1], kUnit, shift) * weight.y);
        }
    }

    MCP_DEVICE void hand_over_dq(const float (&dq)[32]) {
        const FragmentPlace place = fragment_place();
        shared.dq_ring.wait_empty(dq_at);
        store_f32_panels(shared.dq(dq_at.stage), Traits::kBlockM, place.row, place.column, dq);
        this->hand_over(shared.dq_ring, dq_at);
        dq_at.advance();
    }

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem& work, FragmentPlace place) const {
        const i64 to = place.column * params.dk_row_stride +
                       kv_head_of(params, work) * params.dk_head_stride + place.row + 8 * kHalf;
        const i32 num_keys = work.row0 + work.rows - place.column;
        store_transposed_gradient<kHalf, T>(params, params.dk, to, params.dk_row_stride, dk,
                                            params.softmax_scale, num_keys);
    }
};

template <class Traits>
MCP_DEVICE void backward_192(const BwdParams& params) {
    using Shared = Bwd192Shared<Traits>;
    const Shared shared;
    const int warpgroup = uniform(static_cast<i32>(ptx::thread_index()) / kWarpgroupSize);
    const int warp = uniform(static_cast<i32>(ptx::thread_index()) / kWarpSize);
    if (ptx::thread_index() == 0) shared.init_barriers();
    ptx::sync_threads();
    if (warpgroup == 0) {
        ptx::set_max_registers_down<Traits::kProducerRegisters>();
        if (warp == 0) BwdLoader<Traits, Shared>(params, shared).run();
        if (warp == 1) BwdStorer<Traits, Shared>(params, shared).run();
    } else {
        ptx::set_max_registers_up<Traits::kConsumerRegisters>();
        if (warpgroup == 1) {
            ValueGradients<Traits> consumer(params, shared);
            consume(consumer);
        } else {
            KeyGradients<Traits> consumer(params, shared);
            consume(consumer);
        }
    }
}

}  // namespace mcp::attn
