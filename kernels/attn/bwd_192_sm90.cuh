// Attention backward for Hopper, head dims 192 and 256: all three gradients from tiles of 96 or 80
// keys, five products where bwd_wide_sm90.cuh and bwd_dq_sm90.cuh take seven. As in the first of
// them both consumers work on all keys of the tile, and each owns one gradient. So many keys are no
// multiple of a product's 64 rows, and gradients are transposed: rows are their columns, and
// columns are keys.
//
//     values   S = Q K'     P = exp2(S - lse)       dV' += dO' P
//     keys     dP = dO V'   dS = P (dP - delta)     dK' += Q' dS     dQ = dS K
//     storer   dQ: fp32 reduce-add to global memory, 64 columns at a time
//
// P is written twice: in the inputs' type for dV', and in fp16, from which keys make dS in its
// place, so that dS is rounded once as where P stays in registers. Both lie as [keys, queries]. For
// dQ, dS is operand A in registers. Nobody meets: values may be a tile ahead.
// Before P was written twice, this ran on an H200 at 192 (h200_second_2026-11-27.md). At 256 it
// never ran.
#pragma once

#include "bwd_roles.cuh"

namespace mcp::attn {

// Probabilities are held times 2^14: then fp16 has eleven bits of all above 4e-9, and all are below
// 4, whatever rounding does.
constexpr int kProbExponent = 14;
constexpr float kProbScale = 1 << kProbExponent;

// Makes the probabilities, and owns dv.
template <class Traits>
struct ValueGradients : BwdRole<Traits> {
    using Base = BwdRole<Traits>;
    using Base::params, Base::shared, Base::queries_at, Base::dout_at, Base::ds_at, Base::probs_at;
    using Base::kScores, Base::kParts;
    using typename Base::Matrix, typename Base::Queries, typename Base::T;
    static constexpr int kChunks = Traits::kValueDim / 64;

    Matrix dv[kChunks];

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
        if constexpr (kMasked) visible = Base::visible_keys(queries.bounds(), place);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(scores);
        this->release(shared.query_ring, queries_at);
        const u32 weights = transposed_address(shared.ds(ds_at.stage));
        shared.ds_ring.wait_empty(ds_at);
        MCP_UNROLL
        for (int part = 0; part < kParts; part++) {
            this->template make_probabilities<kMasked, kProbExponent>(scores, part, lse, visible);
            u32 packed[4];
            MCP_UNROLL
            for (int i = 0; i < 4; i++) {
                const int first = 8 * part + 2 * i;
                packed[i] = ptx::pack2<fp16>(scores[first], scores[first + 1]);
            }
            store_transposed_part(weights + part * kTransposedStep, packed);
        }
        ptx::mbarrier_arrive(shared.ds_ring.full(ds_at));
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
        ds_at.advance();
    }

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem& work, FragmentPlace place) const {
        this->template store_columns<kHalf>(work, place, params.dv, params.dv_row_stride,
                                            params.dv_head_stride, dv, 1.0f / kProbScale);
    }
};

// Makes the gradients of the scores, owns dk, and makes dq.
template <class Traits>
struct KeyGradients : BwdRole<Traits> {
    using Base = BwdRole<Traits>;
    using Base::params, Base::shared, Base::queries_at, Base::dout_at, Base::ds_at;
    using Base::kScores, Base::kParts;
    using typename Base::Matrix, typename Base::T;
    static constexpr int kChunks = Traits::kHeadDim / 64;
    // Of the probabilities, what is loaded under the product of dP. At 256 there are no registers
    // for all.
    static constexpr int kPartsAhead = Traits::kHeadDim <= 192 ? kParts : 3;

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
        const auto weights = shared.ds(ds_at.stage);
        const u32 address = transposed_address(weights);
        shared.ds_ring.wait_full(ds_at);
        MCP_UNROLL
        for (int part = 0; part < kPartsAhead; part++) {
            load_transposed_part(address + part * kTransposedStep, weights_16 + 4 * part);
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dp);
        this->release(shared.dout_ring, dout_at);
        MCP_UNROLL
        for (int part = 0; part < kParts; part++) {
            const int next = part + kPartsAhead;
            if (next < kParts) {
                load_transposed_part(address + next * kTransposedStep, weights_16 + 4 * next);
            }
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
            this->hand_over_dq(dq, dq_at);
        }
        ptx::wgmma_wait<0>();
        MCP_UNROLL
        for (int c = 0; c < kChunks; c++) ptx::wgmma_pin(dk[c]);
        this->release(shared.query_ring, queries_at);
        this->release(shared.ds_ring, ds_at);
        queries_at.advance();
        dout_at.advance();
        ds_at.advance();
    }

    // Of 16 keys.
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

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem& work, FragmentPlace place) const {
        this->template store_columns<kHalf>(work, place, params.dk, params.dk_row_stride,
                                            params.dk_head_stride, dk, params.softmax_scale);
    }
};

template <class Traits>
MCP_DEVICE void backward_192(const BwdParams& params) {
    using Shared = BwdRolesShared<Traits>;
    move_and_consume<Traits, Shared>(params, [&](const Shared& shared, int warpgroup) {
        ptx::set_max_registers_up<Traits::kConsumerRegisters>();
        if (warpgroup == 1) {
            ValueGradients<Traits> consumer(params, shared);
            consume(consumer);
        } else {
            KeyGradients<Traits> consumer(params, shared);
            consume(consumer);
        }
    });
}

}  // namespace mcp::attn
