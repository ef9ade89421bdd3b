// Attention backward for Hopper, head dim 64: all three gradients from tiles of 160 keys. Two
// consumers make the gradients of the scores, for half of the keys each, and a third one multiplies
// by them:
//
//     scores     S = Q K'      P = exp2(S - lse)      dP = dO V'     dS = P (dP - delta)
//     gradients  dV' += dO' P     dK' += Q' dS     dQ = dS' K
//     storer     dQ: fp32 reduce-add to global memory
//
// P stays in fp32 registers until dS is made of it: nothing is rounded twice. Consumers do not
// meet: scores may be a tile ahead, so that exponentials pass under the products of gradients.
// It has not run on a GPU.
#pragma once

#include "bwd_roles.cuh"

namespace mcp::attn {

// Makes P and dS of half of the keys, and owns nothing.
template <class Traits>
struct ScoreGradients : BwdRole<Traits, Traits::kBlockN / 2> {
    using Base = BwdRole<Traits, Traits::kBlockN / 2>;
    using Base::params, Base::shared, Base::queries_at, Base::dout_at, Base::ds_at, Base::probs_at;
    using Base::kParts;
    using typename Base::Matrix, typename Base::Queries, typename Base::T;
    static_assert(Traits::kScoreConsumers == 2, "each has half of the keys");

    int first_key;  // of the consumer's, in the tile

    MCP_DEVICE ScoreGradients(const BwdParams& params,
                              const BwdRolesShared<Traits>& shared,
                              int consumer)
        : Base(params, shared), first_key(consumer * Traits::kBlockN / 2) {}

    MCP_DEVICE FragmentPlace place_of(const WorkItem& work) const {
        FragmentPlace place = Base::place_of(work);
        place.column += first_key;
        return place;
    }

    MCP_DEVICE void begin() {}
    MCP_DEVICE void visit_tiles(const WorkItem& work, FragmentPlace place) {
        shared.key_ring.wait_full(this->keys_at);
        visit_queries(*this, work, place);
        release_keys(*this);
    }
    MCP_DEVICE void enter_head(i32) {}

    template <bool kMasked>
    MCP_DEVICE void visit(const Queries& queries, FragmentPlace place, i32) {
        Matrix scores, dp;
        float lse[2], delta[2];
        shared.query_ring.wait_full(queries_at);
        issue_a_bt<T>(scores, shared.queries(queries_at.stage), 0, shared.keys(), first_key);
        shared.dout_ring.wait_full(dout_at);
        issue_a_bt<T>(dp, shared.dout(dout_at.stage), 0, shared.values(), first_key);
        this->load_row_pair(lse, shared.lse(queries_at.stage));
        this->load_row_pair(delta, shared.delta(dout_at.stage));
        VisiblePairs visible;
        if constexpr (kMasked) visible = Base::visible_keys(queries.bounds(), place);
        shared.prob_ring.wait_empty(probs_at);
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(scores);
        this->release(shared.query_ring, queries_at);
        const u32 probs = transposed_address(shared.probs(), first_key);
        MCP_UNROLL
        for (int part = 0; part < kParts; part++) {
            this->template make_probabilities<kMasked>(scores, part, lse, visible);
            u32 packed[4];
            MCP_UNROLL
            for (int i = 0; i < 4; i++) {
                const int first = 8 * part + 2 * i;
                packed[i] = ptx::pack2<T>(scores[first], scores[first + 1]);
            }
            store_transposed_part(probs + part * kTransposedStep, packed);
        }
        this->hand_over(shared.prob_ring, probs_at);
        shared.ds_ring.wait_empty(ds_at);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dp);
        this->release(shared.dout_ring, dout_at);
        const u32 ds = transposed_address(shared.ds(ds_at.stage), first_key);
        MCP_UNROLL
        for (int part = 0; part < kParts; part++) {
            u32 packed[4];
            MCP_UNROLL
            for (int i = 0; i < 4; i++) {
                const int first = 8 * part + 2 * i;
                packed[i] = ptx::pack2<T>((dp[first] - delta[i % 2]) * scores[first],
                                          (dp[first + 1] - delta[i % 2]) * scores[first + 1]);
            }
            store_transposed_part(ds + part * kTransposedStep, packed);
        }
        this->hand_over(shared.ds_ring, ds_at);
        queries_at.advance();
        dout_at.advance();
        probs_at.advance();
        ds_at.advance();
    }

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem&, FragmentPlace) const {}
};

// Owns dk and dv, and makes dq.
template <class Traits>
struct InputGradients : BwdRole<Traits> {
    using Base = BwdRole<Traits>;
    using Base::params, Base::shared, Base::queries_at, Base::dout_at, Base::ds_at, Base::probs_at;
    using typename Base::Matrix, typename Base::T;

    RingPosition<Traits::kDqStages> dq_at;
    Matrix dk[1], dv[1];  // as many times 64 columns

    using Base::Base;

    MCP_DEVICE void begin() {
        fill(dk[0], 0.0f);
        fill(dv[0], 0.0f);
    }
    MCP_DEVICE void visit_tiles(const WorkItem& work, FragmentPlace) {
        shared.key_ring.wait_full(this->keys_at);
        MCP_NO_UNROLL
        for (i32 left = num_visits<Traits::kBlockM>(params, work); left > 0; left--) visit();
        release_keys(*this);
    }

    MCP_DEVICE void visit() {
        const auto q = shared.queries(queries_at.stage);
        const auto dout = shared.dout(dout_at.stage);
        const auto ds = shared.ds(ds_at.stage);
        float dq[32];
        shared.dout_ring.wait_full(dout_at);
        shared.prob_ring.wait_full(probs_at);
        issue_at_bt<T>(dv[0], dout, 0, shared.probs());
        shared.query_ring.wait_full(queries_at);
        shared.ds_ring.wait_full(ds_at);
        issue_at_b<T>(dq, ds, shared.keys());
        issue_at_bt<T>(dk[0], q, 0, ds);
        ptx::wgmma_wait<2>();
        ptx::wgmma_pin(dv[0]);
        this->release(shared.dout_ring, dout_at);
        this->release(shared.prob_ring, probs_at);
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(dq);
        this->hand_over_dq(dq, dq_at);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dk[0]);
        this->release(shared.query_ring, queries_at);
        this->release(shared.ds_ring, ds_at);
        queries_at.advance();
        dout_at.advance();
        probs_at.advance();
        ds_at.advance();
    }

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem& work, FragmentPlace place) const {
        this->template store_columns<kHalf>(work, place, params.dk, params.dk_row_stride,
                                             params.dk_head_stride, dk, params.softmax_scale);
        this->template store_columns<kHalf>(work, place, params.dv, params.dv_row_stride,
                                             params.dv_head_stride, dv, 1.0f);
    }
};

template <class Traits>
MCP_DEVICE void backward_64(const BwdParams& params) {
    static_assert(Traits::kHeadDim == 64 && Traits::kValueDim == 64, "gradients have 64 rows");
    using Shared = BwdRolesShared<Traits>;
    move_and_consume<Traits, Shared>(params, [&](const Shared& shared, int warpgroup) {
        if (warpgroup <= Traits::kScoreConsumers) {
            ptx::set_max_registers_down<Traits::kScoreRegisters>();
            ScoreGradients<Traits> consumer(params, shared, warpgroup - 1);
            consume(consumer);
        } else {
            ptx::set_max_registers_up<Traits::kConsumerRegisters>();
            InputGradients<Traits> consumer(params, shared);
            consume(consumer);
        }
    });
}

}  // namespace mcp::attn
