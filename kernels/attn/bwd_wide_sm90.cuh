// Attention backward for Hopper, head dims above 128 (and 64 with softcap), where the gradients of
// 64 keys do not fit one warpgroup's registers. As bwd_sm90.cuh, but a tile has 64 keys and both
// consumers work on all of them:
//
//     consumer 0   S' = K Q'    P' -> shared memory  |       dV += P' dO          | dQ = dS K, dK
//     += dS' Q consumer 1   dP' = V dO'                     meet      dV += P' dO, dS' ->  meet  dQ
//     = dS K, dK += dS' Q
//
// The last three are split by columns, some 64-column panels each; their operand A comes from
// shared memory, transposed by the matrix descriptor where needed. The score products have 64
// columns: with 32, the queries split between the consumers, shared memory would bound them.
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

// Rings as in BwdShared; dq has one per consumer: a 64-column panel of the consumer's part of dq,
// filled by its 128 threads.
// Named barriers, 256 threads:
//   1   p and the weights have been written
//   2   both have multiplied with p and ds of the step before, and they may be overwritten
//   3   ds has been written
template <class Traits>
struct BwdWideShared : BwdRooms<Traits> {
    using Rooms = BwdRooms<Traits>;
    using Scores = Panels<Traits::kBlockM, Traits::kBlockN>;  // rows are queries
    using Rooms::base;
    static_assert(Scores::kBytes == Traits::kScoreBytes, "traits.h and panels.cuh disagree");

    Ring<1> key_ring, dq_rings[2], mail_ring;
    Ring<Traits::kQueryStages> query_ring;
    Ring<Traits::kDoutStages> dout_ring;
    u32 landed;

    MCP_DEVICE BwdWideShared() {
        key_ring.barriers = base + Traits::kBarriersAt;
        dq_rings[0].barriers = key_ring.barriers + Ring<1>::kBytes;
        dq_rings[1].barriers = dq_rings[0].barriers + Ring<1>::kBytes;
        mail_ring.barriers = dq_rings[1].barriers + Ring<1>::kBytes;
        query_ring.barriers = mail_ring.barriers + Ring<1>::kBytes;
        dout_ring.barriers = query_ring.barriers + Ring<Traits::kQueryStages>::kBytes;
        landed = dout_ring.barriers + Ring<Traits::kDoutStages>::kBytes;
    }

    MCP_DEVICE Scores probs() const { return {base + Traits::kProbsAt}; }
    MCP_DEVICE Scores ds() const { return {base + Traits::kDsAt}; }
    // Of thread t of either consumer: vector i of 16 bytes at 2048 * i + 16 * t.
    MCP_DEVICE u32 weights() const {
        return base + Traits::kWeightsAt + 16 * thread_in_warpgroup();
    }
    MCP_DEVICE u32 dq(int consumer) const {
        return base + Traits::kDqAt + consumer * Traits::kDqBytes;
    }

    // One thread; a CTA barrier must follow.
    MCP_DEVICE void init_barriers() const {
        key_ring.init(Traits::kConsumers);
        query_ring.init(Rooms::kConsumerWarps);
        dout_ring.init(Rooms::kConsumerWarps);
        dq_rings[0].init(1, kWarpgroupSize);
        dq_rings[1].init(1, kWarpgroupSize);
        mail_ring.init(Rooms::kConsumerWarps + 1);
        ptx::mbarrier_init(landed, 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();
    }
};

// dq tiles that come in panels of 64 columns, from both consumers in turn.
template <class Traits>
struct PanelDqTiles {
    static constexpr int kCopyGroups = Traits::kHeadPanels;  // per tile
    static constexpr int kOfFirst = Traits::kDqPanels[0];
    static constexpr int kOfSecond = Traits::kDqPanels[1];
    static constexpr int kPanelBytes = Traits::kBlockM * kRowBytes;

    RingPosition<1> at[2];

    template <class Shared>
    MCP_DEVICE void add(
        const BwdParams& params, const Shared& shared, bool leader, i32 head, i32 first) {
        MCP_UNROLL
        for (int panel = 0; panel < 2; panel++) {
            MCP_UNROLL
            for (int consumer = 0; consumer < 2; consumer++) {
                if (panel >= (consumer == 0 ? kOfFirst : kOfSecond)) continue;
                const int column = (consumer * kOfFirst + panel) * kPanelColumns;
                wait(shared.dq_rings[consumer].full(at[consumer]), at[consumer].parity);
                ptx::sync_warp();
                if (leader) {
                    const u32 from = shared.dq(consumer);
                    ptx::tma_reduce_add_3d(&params.dq_map, from, column, head, first);
                    ptx::tma_reduce_add_3d(&params.dq_map, from + kPanelBytes,
                                           column + kF32PanelColumns, head, first);
                    ptx::tma_commit_group();
                    ptx::tma_wait_group_read<0>();
                    shared.dq_rings[consumer].release(at[consumer]);
                }
                at[consumer].advance();
            }
        }
    }
};

// A warpgroup that owns some columns of dk and dv, and makes the probabilities (0) or their
// gradients.
template <class Traits, int kConsumer>
struct BwdWideConsumer {
    using T = typename Traits::T;
    using Shared = BwdWideShared<Traits>;
    using Queries = QueryTiles<Traits::kBlockM>;
    using Matrix = float[Traits::kBlockM / 2];
    using Packed = u32[Traits::kBlockM / 4];
    using RowStats = f32x2[Traits::kBlockM / 8];
    static constexpr int kDkPanels = Traits::kDkPanels[kConsumer];
    static constexpr int kDvPanels = Traits::kDvPanels[kConsumer];
    static constexpr int kDqPanels = Traits::kDqPanels[kConsumer];
    static constexpr int kDqRegisters = 32 * (kDqPanels > 0 ? kDqPanels : 1);
    // Products issued after those of dv, and after those of dq.
    static constexpr int kAfterDq = kDkPanels > 0 ? 1 : 0;
    static constexpr int kAfterDv = kAfterDq + (kDqPanels > 0 ? 1 : 0);
    static constexpr int kFirstDkPanel = kConsumer * Traits::kDkPanels[0];
    static constexpr int kFirstDvPanel = kConsumer * Traits::kDvPanels[0];
    static constexpr int kFirstDqPanel = kConsumer * Traits::kDqPanels[0];

    const BwdParams& params;
    const Shared& shared;
    RingPosition<Traits::kQueryStages> queries_at;
    RingPosition<Traits::kDoutStages> dout_at;
    RingPosition<1> keys_at, dq_at, mail_at;

    // A consumer without panels of a gradient (head dim 64) never touches it.
    float dk[32 * (kDkPanels > 0 ? kDkPanels : 1)];
    float dv[32 * (kDvPanels > 0 ? kDvPanels : 1)];

    MCP_DEVICE BwdWideConsumer(const BwdParams& params, const Shared& shared)
        : params(params), shared(shared) {}

    // P' of the tile, and what dS' is of dP' - delta: P', or P' times the slope of the cap.
    template <bool kMasked>
    MCP_DEVICE void make_probabilities(const Queries& queries, FragmentPlace place) {
        Matrix scores;
        Packed probs_16, weights_16;
        RowStats lse;
        issue_a_bt<T>(scores, shared.keys(), 0, shared.queries(queries_at.stage));
        load_row_stats(lse, shared.lse(queries_at.stage) + 4 * place.column);
        VisiblePairs visible;
        if constexpr (kMasked) {
            visible = visible_pairs<Traits::kBlockM / 4>(queries.bounds(), place);
        }
        ptx::named_barrier_sync<Shared::kConsumerThreads>(2);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(scores);
        Matrix weights;
        if constexpr (Traits::kSoftcap) {
            cap_scores(scores, weights, params);
        }
        to_probabilities(scores, lse, params.score_scale);
        if constexpr (kMasked) apply_mask(scores, visible, 0.0f);
        pack<T>(probs_16, scores);
        if constexpr (Traits::kSoftcap) {
            to_score_gradients(scores, weights);
            pack<T>(weights_16, weights);
        }
        store_transposed(shared.probs(), 0, 0, probs_16);
        const Packed& words = Traits::kSoftcap ? weights_16 : probs_16;
        MCP_UNROLL
        for (int i = 0; i < 4; i++) {
            ptx::store_shared_i32x4(
                shared.weights() + 2048 * i,
                {static_cast<i32>(words[4 * i]), static_cast<i32>(words[4 * i + 1]),
                 static_cast<i32>(words[4 * i + 2]), static_cast<i32>(words[4 * i + 3])});
        }
        ptx::fence_proxy_async();
    }

    // dS' of the tile, from dP' - delta and the weights.
    MCP_DEVICE void store_score_gradients(Matrix& dp) {
        Packed ds_16;
        Matrix weights;
        MCP_UNROLL
        for (int i = 0; i < 4; i++) {
            const i32x4 packed = ptx::load_shared_i32x4(shared.weights() + 2048 * i);
            const i32 words[4] = {packed.x, packed.y, packed.z, packed.w};
            MCP_UNROLL
            for (int j = 0; j < 4; j++) {
                const f32x2 pair = ptx::unpack2<T>(static_cast<u32>(words[j]));
                weights[8 * i + 2 * j] = pair.x;
                weights[8 * i + 2 * j + 1] = pair.y;
            }
        }
        to_score_gradients(weights, dp);
        pack<T>(ds_16, dp);
        store_transposed(shared.ds(), 0, 0, ds_16);
        ptx::fence_proxy_async();
    }

    // The gradients through one query tile.
    template <bool kMasked>
    MCP_DEVICE void visit(const Queries& queries, FragmentPlace place) {
        const auto q = shared.queries(queries_at.stage);
        const auto dout = shared.dout(dout_at.stage);
        float dq[kDqRegisters];
        Matrix dp;
        shared.query_ring.wait_full(queries_at);
        if constexpr (kConsumer == 0) {
            make_probabilities<kMasked>(queries, place);
            shared.dout_ring.wait_full(dout_at);
        } else {
            RowStats delta;
            shared.dout_ring.wait_full(dout_at);
            // Behind the scores: P' is made under this product.
            ptx::named_barrier_sync<Shared::kConsumerThreads>(2);
            issue_a_bt<T>(dp, shared.values(), 0, dout);
            load_row_stats(delta, shared.delta(dout_at.stage) + 4 * place.column);
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(dp);
            subtract_delta(dp, delta);
        }
        ptx::named_barrier_sync<Shared::kConsumerThreads>(1);
        if constexpr (kDvPanels > 0) issue_at_b<T>(dv, shared.probs(), dout, kFirstDvPanel);
        if constexpr (kConsumer == 1) store_score_gradients(dp);
        ptx::named_barrier_sync<Shared::kConsumerThreads>(3);
        if constexpr (kDqPanels > 0) issue_a_b<T>(dq, shared.ds(), 0, shared.keys(), kFirstDqPanel);
        if constexpr (kDkPanels > 0) issue_at_b<T>(dk, shared.ds(), q, kFirstDkPanel);
        ptx::wgmma_wait<kAfterDv>();
        ptx::wgmma_pin(dv);
        release(shared.dout_ring, dout_at);
        ptx::wgmma_wait<kAfterDq>();
        ptx::wgmma_pin(dq);
        if constexpr (kDqPanels > 0) hand_over_dq(dq);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dk);
        release(shared.query_ring, queries_at);
    }

    template <int kStages>
    MCP_DEVICE void release(const Ring<kStages>& ring, RingPosition<kStages>& at) const {
        ptx::sync_warp();  // all lanes have read the row statistics
        if (lane_index() == 0) ring.release(at);
        at.advance();
    }

    MCP_DEVICE void hand_over_dq(const float (&dq)[kDqRegisters]) {
        const FragmentPlace place = fragment_place();
        MCP_UNROLL
        for (int panel = 0; panel < kDqPanels; panel++) {
            float part[32];
            MCP_UNROLL
            for (int i = 0; i < 32; i++) part[i] = dq[32 * panel + i];
            shared.dq_rings[kConsumer].wait_empty(dq_at);
            store_f32_panels(shared.dq(kConsumer), Traits::kBlockM, place.row, place.column, part);
            ptx::fence_proxy_async();
            ptx::mbarrier_arrive(shared.dq_rings[kConsumer].full(dq_at));
            dq_at.advance();
        }
    }

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem& work, FragmentPlace place) const {
        const i32 row = place.row + 8 * kHalf;
        const bool valid = row < work.row0 + work.rows;
        const i32 head = kv_head_of(params, work);
        const i64 dk_at = row * params.dk_row_stride + head * params.dk_head_stride + place.column +
                          kFirstDkPanel * kPanelColumns;
        const i64 dv_at = row * params.dv_row_stride + head * params.dv_head_stride + place.column +
                          kFirstDvPanel * kPanelColumns;
        if constexpr (kDkPanels > 0)
            store_gradient<kHalf, T>(params, params.dk, dk_at, dk, params.softmax_scale, valid);
        if constexpr (kDvPanels > 0)
            store_gradient<kHalf, T>(params, params.dv, dv_at, dv, 1.0f, valid);
    }

    // Of the keys of a tile, where this consumer's begin.
    MCP_DEVICE int first_row() const { return 0; }
};

template <class Traits>
MCP_DEVICE void backward_wide(const BwdParams& params) {
    using Shared = BwdWideShared<Traits>;
    const Shared shared;
    const int warpgroup = uniform(static_cast<i32>(ptx::thread_index()) / kWarpgroupSize);
    const int warp = uniform(static_cast<i32>(ptx::thread_index()) / kWarpSize);
    if (ptx::thread_index() == 0) shared.init_barriers();
    ptx::sync_threads();
    if (warpgroup == 0) {
        ptx::set_max_registers_down<Traits::kProducerRegisters>();
        if (warp == 0) BwdLoader<Traits, Shared>(params, shared).run();
        if (warp == 1) BwdStorer<Traits, Shared, PanelDqTiles<Traits>>(params, shared).run();
    } else {
        ptx::set_max_registers_up<Traits::kConsumerRegisters>();
        if (warpgroup == 1) {
            BwdWideConsumer<Traits, 0> consumer(params, shared);
            consume(consumer);
        } else {
            BwdWideConsumer<Traits, 1> consumer(params, shared);
            consume(consumer);
        }
    }
}

}  // namespace mcp::attn
