// Gradients of keys and values for Hopper, head dims above 128, where those of 64 keys do not fit
// one warpgroup's registers. As bwd_sm90.cuh, but a tile has 64 keys, both
// consumers work on all of them, and each owns one gradient:
//
//     values   S' = K Q'     P'                        dV += P' dO
//     keys     dP' = V dO'   P' (from values)   dS'    dK += dS' Q
//
// P' and dS' are operand A of their own products in registers. Neither waits for a step of the
// other to end: a ring lies between them, and while one works on its elements the other keeps the
// tensor cores busy. dq has a kernel of its own (bwd_dq_sm90.cuh): added up from tiles of 64 keys,
// its sums would fill the way to the second-level cache (89 % of the time, H100, head dim 256) and
// everything would wait for them.
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

// Rings as in BwdShared, and
//   weights  values: every thread          1 lane per warp of keys     what the same thread wrote
template <class Traits>
struct BwdWideShared : BwdRooms<Traits> {
    using Rooms = BwdRooms<Traits>;
    using Stages = Ring<Traits::kStages>;
    using Rooms::base;

    Ring<1> key_ring, mail_ring;
    Stages query_ring, dout_ring, weights_ring;
    u32 landed;

    MCP_DEVICE BwdWideShared() {
        landed = place_rings<Traits::kNumBarriers>(base + Traits::kBarriersAt, key_ring, mail_ring,
                                                   query_ring, dout_ring, weights_ring);
    }

    // Of thread t of either warpgroup: vector i of 16 bytes at 2048 * i + 16 * t.
    MCP_DEVICE u32 weights(int stage) const {
        return base + Traits::kWeightsAt + stage * Traits::kWeightBytes +
               16 * thread_in_warpgroup();
    }

    // One thread; a CTA barrier must follow.
    MCP_DEVICE void init_barriers() const {
        key_ring.init(Traits::kConsumers);
        query_ring.init(Rooms::kConsumerWarps);
        dout_ring.init(Rooms::kConsumerWarps);
        weights_ring.init(kWarpsPerWarpgroup, kWarpgroupSize);
        mail_ring.init(Rooms::kConsumerWarps);
        ptx::mbarrier_init(landed, 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();
    }
};

// What both consumers have: where they stand.
template <class Traits>
struct BwdWideConsumer {
    using T = typename Traits::T;
    using Shared = BwdWideShared<Traits>;
    using Queries = QueryTiles<Traits::kBlockM>;
    using Stages = Ring<Traits::kStages>;
    using Position = RingPosition<Traits::kStages>;
    using Matrix = float[Traits::kBlockM / 2];
    using Packed = u32[Traits::kBlockM / 4];
    using RowStats = f32x2[Traits::kBlockM / 8];

    const BwdParams& params;
    const Shared& shared;
    Position at;  // of the tile, in the rings of q, dout and weights
    RingPosition<1> keys_at, mail_at;

    MCP_DEVICE BwdWideConsumer(const BwdParams& params, const Shared& shared)
        : params(params), shared(shared) {}

    // Each warp for itself: it has read what threads read, and its products have ended.
    MCP_DEVICE void release(Stages ring, Position stage) const {
        ptx::sync_warp();
        if (lane_index() == 0) ring.release(stage);
    }

    // Rows are keys.
    MCP_DEVICE FragmentPlace place_of(const WorkItem& work) const {
        FragmentPlace place = fragment_place();
        place.row += work.row0;
        return place;
    }
};

// Makes the probabilities, and owns dv.
template <class Traits>
struct ValueGradients : BwdWideConsumer<Traits> {
    using Base = BwdWideConsumer<Traits>;
    using Base::params, Base::shared, Base::at;
    using typename Base::Matrix, typename Base::Packed;
    using typename Base::Queries, typename Base::T;

    float dv[Traits::kValueDim / 2];

    using Base::Base;

    MCP_DEVICE void begin() { fill(dv, 0.0f); }
    MCP_DEVICE void visit_tiles(const WorkItem& work, FragmentPlace place) {
        shared.key_ring.wait_full(this->keys_at);
        MCP_NO_UNROLL
        for (i32 left = params.heads_per_item; left > 0; left--) {
            Queries queries(params.segments, work);
            do {
                visit(queries, place);
            } while (queries.advance());
        }
        release_keys(*this);
    }

    MCP_DEVICE void visit(const Queries& queries, FragmentPlace place) {
        Matrix scores;
        shared.query_ring.wait_full(at);
        issue_a_bt<T>(scores, shared.keys(), 0, shared.queries(at.stage));
        VisiblePairs visible = {{0xffffffffu, 0xffffffffu}};
        if (queries.num_full() <= 0) {
            visible = visible_pairs<Traits::kBlockM / 4>(queries.bounds(), place);
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(scores);
        Packed probs_16, weights_16;
        MCP_UNROLL
        for (int i = 0; i < Traits::kBlockM / 16; i++) {
            const u32 lse = shared.lse(at.stage) + 4 * place.column + 64 * i;
            make_probabilities(scores, i, lse, visible, probs_16, weights_16);
        }
        this->release(shared.query_ring, at);
        hand_over(weights_16);
        shared.dout_ring.wait_full(at);
        issue_p_b<T>(dv, probs_16, shared.dout(at.stage));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dv);
        this->release(shared.dout_ring, at);
        at.advance();
    }

    // 16 queries, from their scores to packed words: the probabilities P', and the weights, what
    // dS' is of dP' - delta: P', or P' times the slope of the cap. Few of the values between are
    // alive at once.
    MCP_DEVICE void make_probabilities(const Matrix& scores,
                                       int part,
                                       u32 lse,
                                       const VisiblePairs& visible,
                                       Packed& probs_16,
                                       Packed& weights_16) {
        float probs[8], slopes[8];
        f32x2 stats[2];
        load_row_stats(stats, lse);
        MCP_UNROLL
        for (int i = 0; i < 8; i++) probs[i] = scores[8 * part + i];
        if constexpr (Traits::kSoftcap) cap_scores(probs, slopes, params);
        to_probabilities(probs, stats, params.score_scale);
        apply_mask(probs, {{visible.row[0] >> 4 * part, visible.row[1] >> 4 * part}}, 0.0f);
        MCP_UNROLL
        for (int i = 0; i < 4; i++) {
            probs_16[4 * part + i] = ptx::pack2<T>(probs[2 * i], probs[2 * i + 1]);
        }
        if constexpr (Traits::kSoftcap) to_score_gradients(probs, slopes);
        MCP_UNROLL
        for (int i = 0; i < 4; i++) {
            weights_16[4 * part + i] = Traits::kSoftcap
                                           ? ptx::pack2<T>(slopes[2 * i], slopes[2 * i + 1])
                                           : probs_16[4 * part + i];
        }
    }

    MCP_DEVICE void hand_over(const Packed& weights_16) {
        shared.weights_ring.wait_empty(at);
        MCP_UNROLL
        for (int i = 0; i < Traits::kBlockM / 16; i++) {
            ptx::store_shared_i32x4(
                shared.weights(at.stage) + 2048 * i,
                {static_cast<i32>(weights_16[4 * i]), static_cast<i32>(weights_16[4 * i + 1]),
                 static_cast<i32>(weights_16[4 * i + 2]), static_cast<i32>(weights_16[4 * i + 3])});
        }
        ptx::mbarrier_arrive(shared.weights_ring.full(at));
    }

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem& work, FragmentPlace place) const {
        const i32 row = place.row + 8 * kHalf;
        const i64 to = row * params.dv_row_stride +
                       kv_head_of(params, work) * params.dv_head_stride + place.column;
        store_gradient<kHalf, T>(params, params.dv, to, dv, 1.0f, row < work.row0 + work.rows);
    }
};

// Makes the gradients of the scores, and owns dk.
template <class Traits>
struct KeyGradients : BwdWideConsumer<Traits> {
    using Base = BwdWideConsumer<Traits>;
    using Base::params, Base::shared, Base::at;
    using typename Base::Matrix, typename Base::Packed, typename Base::RowStats;
    using typename Base::T;

    float dk[Traits::kHeadDim / 2];

    using Base::Base;

    MCP_DEVICE void begin() { fill(dk, 0.0f); }
    MCP_DEVICE void visit_tiles(const WorkItem& work, FragmentPlace place) {
        shared.key_ring.wait_full(this->keys_at);
        MCP_NO_UNROLL
        for (i32 left = num_visits<Traits::kBlockM>(params, work); left > 0; left--) visit();
        release_keys(*this);
    }

    MCP_DEVICE void visit() {
        Matrix dp;
        RowStats delta;
        shared.dout_ring.wait_full(at);
        issue_a_bt<T>(dp, shared.values(), 0, shared.dout(at.stage));
        load_row_stats(delta, shared.delta(at.stage) + 4 * fragment_place().column);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dp);
        subtract_delta(dp, delta);
        this->release(shared.dout_ring, at);
        multiply_with_weights(dp);
        Packed ds_16;
        pack<T>(ds_16, dp);
        shared.query_ring.wait_full(at);
        issue_p_b<T>(dk, ds_16, shared.queries(at.stage));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dk);
        this->release(shared.query_ring, at);
        at.advance();
    }

    MCP_DEVICE void multiply_with_weights(Matrix& dp) {
        shared.weights_ring.wait_full(at);
        MCP_UNROLL
        for (int i = 0; i < Traits::kBlockM / 16; i++) {
            const i32x4 packed = ptx::load_shared_i32x4(shared.weights(at.stage) + 2048 * i);
            const i32 words[4] = {packed.x, packed.y, packed.z, packed.w};
            MCP_UNROLL
            for (int j = 0; j < 4; j++) {
                const f32x2 pair = ptx::unpack2<T>(static_cast<u32>(words[j]));
                dp[8 * i + 2 * j] *= pair.x;
                dp[8 * i + 2 * j + 1] *= pair.y;
            }
        }
        this->release(shared.weights_ring, at);
    }

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem& work, FragmentPlace place) const {
        const i32 row = place.row + 8 * kHalf;
        const i64 to = row * params.dk_row_stride +
                       kv_head_of(params, work) * params.dk_head_stride + place.column;
        store_gradient<kHalf, T>(params, params.dk, to, dk, params.softmax_scale,
                                 row < work.row0 + work.rows);
    }
};

template <class Traits>
MCP_DEVICE void backward_wide(const BwdParams& params) {
    using Shared = BwdWideShared<Traits>;
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
