// Attention backward for Hopper, head dims 96 and 128, and dk and dv of 64. One CTA per
// multiprocessor keeps 128 keys and values in shared memory, their gradients in registers, and
// lets the query tiles that see them pass by, for every query head of the group, or of a part of
// it:
//
//     loader     k v | q0 dout0 q1 dout1 ...                       TMA, rings of stages
//     consumers  S' = K Q'   dP' = V dO'                           64 keys each
//                P' = exp2(S' - lse)   dS' = P' (dP' - delta)
//                dV += P' dO   [dS' -> shared memory, meet]   dQ = dS K   dK += dS' Q
//     storer     dQ: fp32 reduce-add to global memory
//
// All matrices are transposed (keys are rows), so that P' and dS' are in registers as operand A of
// dV and dK. A key tile is one CTA's, so dK and dV have the same bits in every run, unless the
// heads of a group are dealt out. dQ has not; where it must, the kernel is compiled without it, and
// bwd_dq_sm90.cuh makes it. Method: FlashAttention-3.
#pragma once

#include <mcp/fragment.cuh>
#include <mcp/gemm.cuh>
#include <mcp/mailbox.cuh>

#include "bwd_elements.cuh"
#include "bwd_load_store.cuh"
#include "bwd_shared.cuh"
#include "bwd_work.cuh"
#include "dropout.cuh"
#include "mask.cuh"
#include "params.h"
#include "tile_iter.cuh"
#include "traits.h"

namespace mcp::attn {

// A warpgroup that owns 64 keys of the tile.
template <class Traits>
struct BwdConsumer {
    using T = typename Traits::T;
    using Shared = BwdShared<Traits>;
    using Queries = QueryTiles<Traits::kBlockM>;
    using Position = RingPosition<Traits::kStages>;
    static constexpr int kScores = Traits::kBlockM / 2;
    static constexpr int kQueriesOfTile = Traits::kBlockM;

    const BwdParams& params;
    const Shared& shared;
    int consumer;
    Position rows_at;
    RingPosition<1> keys_at, dq_at, mail_at;

    float dk[Traits::kHeadDim / 2];
    float dv[Traits::kValueDim / 2];
    RowWords key_words;
    i32 query_head;

    MCP_DEVICE BwdConsumer(const BwdParams& params, const Shared& shared, int consumer)
        : params(params), shared(shared), consumer(consumer) {}

    MCP_DEVICE void begin() {
        fill(dk, 0.0f);
        fill(dv, 0.0f);
    }

    MCP_DEVICE void visit_tiles(const WorkItem& work, FragmentPlace place) {
        shared.key_ring.wait_full(keys_at);
        if constexpr (Traits::kDropout) {
            key_words.load(params.dropout.key_words + place.row);
        }
        visit_queries(*this, work, place);
        release_keys(*this);
    }

    MCP_DEVICE void enter_head(i32 head) {
        if constexpr (Traits::kDropout) query_head = head;
    }
    // Not before the probabilities are known: the registers that held lse are free then.
    MCP_DEVICE void mark(float (&probs)[kScores], i32 first) const {
        const i32* const words = words_of_head(params.dropout, query_head) + first;
        mark_dropped<true>(probs, key_words, hold_address(words, probs), params.dropout.threshold);
    }

    // The gradients through one query tile.
    template <bool kMasked>
    MCP_DEVICE void visit(const Queries& queries, FragmentPlace place, i32 first_query) {
        const auto q = shared.queries(rows_at.stage);
        const auto dout = shared.dout(rows_at.stage);
        const u32 lse = shared.lse(rows_at.stage) + 4 * place.column;
        const u32 delta = shared.delta(rows_at.stage) + 4 * place.column;
        float scores[kScores], dp[kScores], dq[32];
        u32 probs_16[kScores / 2], ds_16[kScores / 2];

        shared.query_ring.wait_full(rows_at);
        issue_a_bt<T>(scores, shared.keys(), consumer * 64, q);
        shared.dout_ring.wait_full(rows_at);
        issue_a_bt<T>(dp, shared.values(), consumer * 64, dout);
        f32x2 row_lse[kScores / 4], row_delta[kScores / 4];
        if constexpr (!Traits::kSoftcap) load_row_stats(row_lse, lse);
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(scores);
        if constexpr (Traits::kSoftcap) {
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(dp);
            to_capped_probabilities(scores, dp, lse, delta, params);
        } else {
            to_probabilities(scores, row_lse, params.score_scale);
        }
        if constexpr (Traits::kDropout) mark(scores, first_query + place.column);
        if constexpr (kMasked) {
            apply_mask(scores, visible_pairs<kScores / 2>(queries.bounds(), place), 0.0f);
        }
        if constexpr (!Traits::kSoftcap) {
            // A marked probability may be -1, of a query that sees one key.
            constexpr float kNever = Traits::kDropout ? -2.0f : -1.0f;
            load_row_stats(row_delta, hold_address(delta, scores, kNever));
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(dp);
            if constexpr (!Traits::kDropout) subtract_delta(dp, row_delta);
        }
        if constexpr (Traits::kDropout) {
            to_score_gradients_with_dropout(scores, dp, row_delta, params.dropout.scale);
        } else {
            to_score_gradients(scores, dp);
        }
        // Both at the end: packed probabilities beside unpacked gradients would cost registers that
        // are not there.
        pack<T>(probs_16, scores);
        pack<T>(ds_16, dp);
        if constexpr (Traits::kAddsDq) {
            // Of two buffers: the other consumer may still multiply the last one.
            static_assert(Traits::kStages == 2, "a stage is a buffer for dS, too");
            const auto ds = shared.ds(rows_at.stage);
            store_transposed(ds, consumer, 0, ds_16);
            issue_p_b<T>(dv, probs_16, dout);
            ptx::fence_proxy_async();
            ptx::named_barrier_sync<Shared::kConsumerThreads>(1);

            issue_a_b<T>(dq, ds, shared.keys(), consumer);
            ptx::wgmma_wait<1>();
            ptx::wgmma_pin(dv);
            release(shared.dout_ring);
            issue_p_b<T>(dk, ds_16, q);
            ptx::wgmma_wait<1>();
            ptx::wgmma_pin(dq);
            hand_over_dq(dq);
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(dk);
            release(shared.query_ring);
        } else {
            issue_p_b<T>(dk, ds_16, q);
            issue_p_b<T>(dv, probs_16, dout);
            ptx::wgmma_wait<1>();
            ptx::wgmma_pin(dk);
            release(shared.query_ring);
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(dv);
            release(shared.dout_ring);
        }
        rows_at.advance();
    }

    MCP_DEVICE void release(const Ring<Traits::kStages>& ring) const {
        ptx::sync_warp();  // all lanes have read the row statistics
        if (lane_index() == 0) ring.release(rows_at);
    }

    // A consumer's 64 x 64 of dq: a pair of 32-column panels.
    MCP_DEVICE void hand_over_dq(const float (&dq)[32]) {
        const FragmentPlace in_tile = fragment_place_anew();
        const u32 panels = shared.dq() + consumer * 2 * Traits::kBlockM * kRowBytes;
        shared.dq_ring.wait_empty(dq_at);
        store_f32_panels(panels, Traits::kBlockM, in_tile.row, in_tile.column, dq);
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(shared.dq_ring.full(dq_at));
        dq_at.advance();
    }

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem& work, FragmentPlace place) const {
        const i32 row = place.row + 8 * kHalf;
        const bool valid = row < work.row0 + work.rows;
        const i32 head = kv_head_of(params, work);
        const i64 dk_at = row * params.dk_row_stride + head * params.dk_head_stride + place.column;
        const i64 dv_at = row * params.dv_row_stride + head * params.dv_head_stride + place.column;
        store_gradient<kHalf, T>(params, params.dk, dk_at, dk, params.softmax_scale, valid);
        store_gradient<kHalf, T>(params, params.dv, dv_at, dv, 1.0f, valid);
    }

    // Rows are keys.
    MCP_DEVICE FragmentPlace place_of(const WorkItem& work) const {
        FragmentPlace place = fragment_place();
        place.row += work.row0 + consumer * 64;
        return place;
    }
};

template <class Traits>
MCP_DEVICE void backward(const BwdParams& params) {
    using Shared = BwdShared<Traits>;
    move_and_consume<Traits, Shared>(params, [&](const Shared& shared, int warpgroup) {
        ptx::set_max_registers_up<Traits::kConsumerRegisters>();
        BwdConsumer<Traits> consumer(params, shared, warpgroup - 1);
        consume(consumer);
    });
}

}  // namespace mcp::attn
