// What the backward kernels have whose consumers have different work (bwd_64_sm90.cuh,
// bwd_192_sm90.cuh): the last one makes dq, the ones before it make the probabilities. Scores are
// [queries, keys]; probabilities and the gradients of scores go through shared memory as [keys,
// queries]; gradients are transposed (rows are their columns, and columns are keys), as the keys of
// a tile are no multiple of a product's 64 rows.
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
//   probs   every thread that makes P      1 lane per warp of one      P in the inputs' type
//                                          consumer
//   ds      every thread that makes P      1 lane per warp of the      dS, or P in fp16, of which
//                                          last consumer               that consumer makes dS there
//   dq      last consumer: every thread    1 thread of the storer      64 columns of the dq tile
// Named barrier 1 is the last consumer's own, of 128 threads.
template <class Traits>
struct BwdRolesShared : BwdRooms<Traits> {
    using Rooms = BwdRooms<Traits>;
    using Scores = Panels<Traits::kBlockN, Traits::kBlockM>;
    using QueryStages = Ring<Traits::kStages>;
    using DoutStages = Ring<Traits::kDoutStages>;
    using DsStages = Ring<Traits::kDsStages>;
    using DqStages = Ring<Traits::kDqStages>;
    using Rooms::base;
    static_assert(Scores::kBytes == Traits::kScoreBytes, "traits.h and panels.cuh disagree");

    Ring<1> key_ring, mail_ring, prob_ring;
    QueryStages query_ring;
    DoutStages dout_ring;
    DsStages ds_ring;
    DqStages dq_ring;
    u32 landed;

    MCP_DEVICE BwdRolesShared() {
        landed = place_rings<Traits::kNumBarriers>(base + Traits::kBarriersAt, key_ring, mail_ring,
                                                   prob_ring, query_ring, dout_ring, ds_ring,
                                                   dq_ring);
    }

    MCP_DEVICE Scores probs() const { return {base + Traits::kProbsAt}; }
    MCP_DEVICE Scores ds(int stage) const {
        return {base + Traits::kDsAt + stage * Traits::kScoreBytes};
    }
    MCP_DEVICE u32 dq(int stage) const { return base + Traits::kDqAt + stage * Traits::kDqBytes; }

    // One thread; a CTA barrier must follow.
    MCP_DEVICE void init_barriers() const {
        key_ring.init(Traits::kConsumers);
        query_ring.init(Rooms::kConsumerWarps);
        dout_ring.init(Rooms::kConsumerWarps);
        prob_ring.init(kWarpsPerWarpgroup, Traits::kScoreConsumers * kWarpgroupSize);
        ds_ring.init(kWarpsPerWarpgroup, Traits::kScoreConsumers * kWarpgroupSize);
        dq_ring.init(1, kWarpgroupSize);
        mail_ring.init(Rooms::kConsumerWarps + 1);
        ptx::mbarrier_init(landed, 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();
    }
};

// What all consumers have: where they stand. kKeys: of the consumer's scores.
template <class Traits, int kKeys = Traits::kBlockN>
struct BwdRole {
    using T = typename Traits::T;
    using Shared = BwdRolesShared<Traits>;
    using Queries = QueryTiles<Traits::kBlockM>;
    static constexpr int kScores = kKeys / 2;
    static constexpr int kParts = kKeys / 16;  // of 16 keys, 8 scores of a thread
    static constexpr int kQueriesOfTile = Traits::kBlockM;
    using Matrix = float[kScores];  // [64, keys]: scores, or 64 columns of a gradient

    const BwdParams& params;
    const Shared& shared;
    RingPosition<Traits::kStages> queries_at;
    RingPosition<Traits::kDoutStages> dout_at;
    RingPosition<Traits::kDsStages> ds_at;
    RingPosition<1> keys_at, mail_at, probs_at;

    MCP_DEVICE BwdRole(const BwdParams& params, const Shared& shared)
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

    MCP_DEVICE static VisiblePairs visible_keys(const MaskBounds& tile, FragmentPlace place) {
        return {{rows_that_see<kScores / 2>(tile, place.row, place.column),
                 rows_that_see<kScores / 2>(tile, place.row + 8, place.column)}};
    }

    // Scores of 16 keys become probabilities, times 2 to the power of kExponent.
    template <bool kMasked, int kExponent = 0>
    MCP_DEVICE void make_probabilities(Matrix& scores,
                                       int part,
                                       const float (&lse)[2],
                                       const VisiblePairs& visible) const {
        float probs[8];
        MCP_UNROLL
        for (int i = 0; i < 8; i++) {
            const float shifted_lse = lse[i / 2 % 2] - kExponent;
            probs[i] = ptx::exp2_approx(
                ptx::fma(scores[8 * part + i], params.score_scale, -shifted_lse));
        }
        if constexpr (kMasked) {
            apply_mask(probs, {{visible.row[0] >> 4 * part, visible.row[1] >> 4 * part}}, 0.0f);
        }
        MCP_UNROLL
        for (int i = 0; i < 8; i++) scores[8 * part + i] = probs[i];
    }

    // 64 columns of the dq tile go to the storer.
    MCP_DEVICE void hand_over_dq(const float (&dq)[32], RingPosition<Traits::kDqStages>& dq_at) {
        const FragmentPlace place = fragment_place();
        shared.dq_ring.wait_empty(dq_at);
        store_f32_panels(shared.dq(dq_at.stage), Traits::kBlockM, place.row, place.column, dq);
        hand_over(shared.dq_ring, dq_at);
        dq_at.advance();
    }

    // Columns are keys.
    MCP_DEVICE FragmentPlace place_of(const WorkItem& work) const {
        FragmentPlace place = fragment_place();
        place.column += work.row0;
        return place;
    }

    // A gradient's rows, of the first or of the second half of each eight, times `factor`.
    template <int kHalf, int kChunks>
    MCP_DEVICE void store_columns(const WorkItem& work,
                                   FragmentPlace place,
                                   void* gradient,
                                   i64 key_stride,
                                   i64 head_stride,
                                   const Matrix (&d)[kChunks],
                                   float factor) const {
        const i64 to = place.column * key_stride + kv_head_of(params, work) * head_stride +
                       place.row + 8 * kHalf;
        const i32 num_keys = work.row0 + work.rows - place.column;
        store_transposed_gradient<kHalf, T>(params, gradient, to, key_stride, d, factor, num_keys);
    }
};

}  // namespace mcp::attn
