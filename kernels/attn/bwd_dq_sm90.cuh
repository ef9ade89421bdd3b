// dq for Hopper, without a sum that several CTAs add to: as in the forward kernel, a CTA owns a
// tile of queries, and the key tiles that they see pass by. Beside bwd_sm90.cuh or
// bwd_wide_sm90.cuh, which make dk and dv, this computes the scores and their gradients a second
// time, seven products for five. It is taken where the same bits are asked for in every run, and
// where no kernel adds dq up.
//
//     producer    q dout | k0 v0 k1 v1 ...                        TMA, rings of stages
//     consumers   S = Q K'   dP = dO V'                           64 query rows each
//                 P = exp2(S - lse)   dS = P (dP - delta)
//                 dQ += dS K                                      under the next S
#pragma once

#include <mcp/fragment.cuh>
#include <mcp/gemm.cuh>
#include <mcp/mailbox.cuh>
#include <mcp/ring.cuh>

#include "dropout.cuh"
#include "key_producer.cuh"
#include "mask.cuh"
#include "params.h"
#include "segment_mail.cuh"
#include "softcap.cuh"
#include "store_row.cuh"
#include "tile_iter.cuh"
#include "traits.h"

namespace mcp::attn {

// Consumer threads read the mailbox, wgmma reads the tiles.
//   ring     filled by                       emptied by (arrivals)       what a reader may read
//   queries  producer: bytes of q and dout   1 thread per consumer       the tiles of q and dout
//   keys     producer: bytes of k, or 1      1 thread per consumer       the stage's k tile
//            arrival after clearing rows
//   values   producer: bytes of v            1 thread per consumer       the stage's v tile
//   mail     producer: 1 arrival             1 lane per consumer warp    the slot's message
// `tail` is the producer's own: a k tile whose last rows it must clear has landed.
template <class Traits>
struct DqShared {
    using Queries = Panels<Traits::kBlockM, Traits::kHeadDim>;
    using Dout = Panels<Traits::kBlockM, Traits::kValueDim>;
    using Keys = Panels<Traits::kBlockN, Traits::kHeadDim>;
    using Values = Panels<Traits::kBlockN, Traits::kValueDim>;
    using Mails = Ring<Traits::kMailSlots>;
    static constexpr int kConsumerWarps = Traits::kConsumers * kWarpsPerWarpgroup;
    static_assert(Traits::kMailBytes == Traits::kMailSlots * SegmentMail::kBytes &&
                      Queries::kBytes == Traits::kQueryBytes &&
                      Dout::kBytes == Traits::kDoutBytes && Keys::kBytes == Traits::kKeyBytes &&
                      Values::kBytes == Traits::kValueBytes,
                  "traits.h disagrees with panels.cuh or segment_mail.cuh");

    u32 base;
    Ring<1> query_ring;
    Mails mail_ring;
    Ring<Traits::kKeyStages> key_ring;
    Ring<Traits::kValueStages> value_ring;
    u32 tail;

    MCP_DEVICE DqShared() {
        base = (ptx::dynamic_shared() + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
        tail = place_rings<Traits::kNumBarriers>(base + Traits::kBarriersAt, query_ring, mail_ring,
                                                 key_ring, value_ring);
    }

    MCP_DEVICE Queries queries() const { return {base + Traits::kQueryAt}; }
    MCP_DEVICE Dout dout() const { return {base + Traits::kDoutAt}; }
    MCP_DEVICE Keys keys(int stage) const {
        return {base + Traits::kKeysAt + stage * Traits::kKeyBytes};
    }
    MCP_DEVICE Values values(int stage) const {
        return {base + Traits::kValuesAt + stage * Traits::kValueBytes};
    }
    MCP_DEVICE u32 mailbox() const { return base + Traits::kMailboxAt; }

    // One thread; a CTA barrier must follow.
    MCP_DEVICE void init_barriers() const {
        query_ring.init(Traits::kConsumers);
        key_ring.init(Traits::kConsumers);
        value_ring.init(Traits::kConsumers);
        mail_ring.init(kConsumerWarps);
        ptx::mbarrier_init(tail, 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();
    }
};

template <class Traits>
struct DqProducer
    : KeyProducer<DqProducer<Traits>, DqParams, DqShared<Traits>, Traits::kMailSlots> {
    using Base = KeyProducer<DqProducer<Traits>, DqParams, DqShared<Traits>, Traits::kMailSlots>;
    using Base::Base, Base::leader, Base::params, Base::post, Base::queries_at, Base::shared;

    RingPosition<Traits::kKeyStages> keys_at;
    RingPosition<Traits::kValueStages> values_at;

    MCP_DEVICE void load_queries(const WorkItem& work) {
        shared.query_ring.wait_empty(queries_at);
        ptx::sync_warp();
        if (leader) {
            const u32 full = shared.query_ring.full(queries_at);
            ptx::mbarrier_arrive_expect_tx(full, Traits::kQueryBytes + Traits::kDoutBytes);
            load_panels(shared.queries(), &params.q_map, full, work.head, work.row0,
                        ptx::kEvictFirst);
            load_panels(shared.dout(), &params.dout_map, full, work.head, work.row0,
                        ptx::kEvictFirst);
        }
        queries_at.advance();
    }

    MCP_DEVICE void load_keys(int kv_head, int first_key, int end) {
        this->load(shared.key_ring, keys_at, shared.keys(keys_at.stage), &params.k_map, kv_head,
                   first_key, end);
    }
    MCP_DEVICE void load_values(int kv_head, int first_key) {
        this->load(shared.value_ring, values_at, shared.values(values_at.stage), &params.v_map,
                   kv_head, first_key);
    }

    MCP_DEVICE void load_tiles(const WorkItem& work) {
        const i32 kv_head = work.head / (params.num_heads / params.num_kv_heads);
        KeyTiles<Traits::kBlockN> keys(params.segments, work);
        post(to_mail(work, keys));
        load_queries(work);
        for (;;) {
            load_keys(kv_head, keys.first(), keys.k1);
            load_values(kv_head, keys.first());
            const i32 segments_left = keys.segments_left;
            if (!keys.advance()) break;
            if (keys.segments_left != segments_left) post(to_mail(work, keys));
        }
    }
};

// A warpgroup that owns 64 query rows of the tile.
template <class Traits>
struct DqConsumer {
    using T = typename Traits::T;
    using Shared = DqShared<Traits>;
    using KeyPosition = RingPosition<Traits::kKeyStages>;
    using Scores = float[Traits::kBlockN / 2];

    const DqParams& params;
    const Shared& shared;
    int consumer;
    KeyPosition keys_at, multiplied_at;  // the tile at hand, and that of the product in flight
    RingPosition<Traits::kValueStages> values_at;
    RingPosition<1> queries_at;
    MailedKeys<Traits::kBlockN, Traits::kMailSlots> keys;

    float dq[Traits::kHeadDim / 2];
    u32 ds_16[Traits::kBlockN / 4];
    float lse[2], delta[2];  // of the thread's two rows
    RowWords words;

    MCP_DEVICE DqConsumer(const DqParams& params, const Shared& shared, int consumer)
        : params(params),
          shared(shared),
          consumer(consumer),
          keys(shared.mailbox(), shared.mail_ring) {}

    template <int kStages>
    MCP_DEVICE void release(Ring<kStages> ring, RingPosition<kStages>& at) const {
        if (thread_in_warpgroup() == 0) ring.release(at);
        at.advance();
    }

    // Scores -> what dS is of dP - delta: the probabilities, or these times the slope of the cap.
    MCP_DEVICE void to_weights(Scores& scores) const {
        MCP_UNROLL
        for (int group = 0; group < Traits::kBlockN / 2 / kCapGroup; group++) {
            float r[kCapGroup];
            if constexpr (Traits::kSoftcap) {
                cap_reciprocals<true>(r, scores, group, params.cap_scale);
            }
            MCP_UNROLL
            for (int i = 0; i < kCapGroup; i++) {
                float& x = scores[cap_register(group, i)];
                const float row_lse = lse[group % 2];
                if constexpr (Traits::kSoftcap) {
                    x = 4.0f * r[i] * (1.0f - r[i]) *
                        ptx::exp2_approx(ptx::fma(-2.0f * params.cap, r[i], params.cap - row_lse));
                } else {
                    x = ptx::exp2_approx(ptx::fma(x, params.score_scale, -row_lse));
                }
            }
        }
    }

    // Marks what dropout drops of the tile that is `ahead` further on than `keys`.
    MCP_DEVICE void mark(Scores& probs, FragmentPlace place, i32 ahead) const {
        const i32 first = keys.first() - ahead * Traits::kBlockN + place.column;
        mark_dropped<false>(probs, words, params.dropout.key_words + first,
                            params.dropout.threshold);
    }

    // One key tile; the product of the one before is still in flight, unless it is the first.
    template <bool kMasked>
    MCP_DEVICE void visit(FragmentPlace place, bool is_first, i32 ahead) {
        Scores scores, dp;
        shared.key_ring.wait_full(keys_at);
        issue_a_bt<T>(scores, shared.queries(), consumer * 64, shared.keys(keys_at.stage));
        shared.value_ring.wait_full(values_at);
        issue_a_bt<T>(dp, shared.dout(), consumer * 64, shared.values(values_at.stage));
        VisiblePairs visible;
        if constexpr (kMasked) visible = visible_pairs<Traits::kBlockN / 4>(keys.bounds(), place);
        ptx::wgmma_wait<2>();
        ptx::wgmma_pin(dq);
        if (!is_first) release(shared.key_ring, multiplied_at);
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(scores);
        to_weights(scores);
        if constexpr (Traits::kDropout) mark(scores, place, ahead);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dp);
        release(shared.value_ring, values_at);
        MCP_UNROLL
        for (int i = 0; i < Traits::kBlockN / 2; i++) {
            if constexpr (Traits::kDropout) {
                dp[i] = after_dropout(scores[i], dp[i], params.dropout.scale);
                scores[i] = ptx::abs(scores[i]);
            }
            dp[i] = (dp[i] - delta[i / 2 % 2]) * scores[i];
        }
        // What is hidden may be NaN in dP: v may hold anything there.
        if constexpr (kMasked) apply_mask(dp, visible, 0.0f);
        pack<T>(ds_16, dp);
        issue_p_b<T>(dq, ds_16, shared.keys(keys_at.stage));
        keys_at.advance();
    }

    MCP_DEVICE void visit_keys(FragmentPlace place) {
        shared.query_ring.wait_full(queries_at);
        bool more = true, is_first = true;
        MCP_NO_UNROLL
        while (more) {
            const i32 num_full = keys.num_full();
            if (num_full > 0) {
                MCP_NO_UNROLL
                for (i32 left = num_full; left > 0; left--) {
                    visit<false>(place, is_first, num_full - left);
                    is_first = false;
                }
                more = keys.advance(num_full);
            } else {
                visit<true>(place, is_first, 0);
                is_first = false;
                more = keys.advance(1);
            }
        }
        release(shared.query_ring, queries_at);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dq);
        release(shared.key_ring, multiplied_at);
    }

    MCP_DEVICE void load_row_stats(const WorkItem& work, FragmentPlace place) {
        const i64 line = static_cast<i64>(work.head) * params.padded_rows;
        MCP_UNROLL
        for (int half = 0; half < 2; half++) {
            const i32 row = place.row + 8 * half;
            const bool valid = row < work.row0 + work.rows;
            lse[half] = valid ? ptx::load_global<float>(params.lse_2 + line + row)
                              : positive_infinity();
            delta[half] = valid ? ptx::load_global<float>(params.delta + line + row) : 0.0f;
        }
        if constexpr (Traits::kDropout) {
            words.load(words_of_head(params.dropout, work.head) + place.row);
        }
    }

    template <int kHalf>
    MCP_DEVICE void store(const WorkItem& work, FragmentPlace place) const {
        const i32 row = place.row + 8 * kHalf;
        const bool valid = row < work.row0 + work.rows;
        const i64 to =
            row * params.dq_row_stride + work.head * params.dq_head_stride + place.column;
        if (params.dq_is_float) {
            float* const dq_row = static_cast<float*>(params.dq) + to;
            if (valid) store_or_add_row_f32(dq_row, dq, kHalf, params.factor, params.accumulate);
        } else {
            store_row_16<T>(static_cast<u16*>(params.dq) + to, dq, kHalf, params.factor, valid);
        }
    }

    MCP_DEVICE void run() {
        for (;;) {
            const WorkItem work = keys.open();
            if (work.head < 0) break;
            FragmentPlace place = fragment_place();
            place.row += work.row0 + consumer * 64;
            load_row_stats(work, place);
            fill(dq, 0.0f);
            if (work.num_segs > 0) visit_keys(place);
            keys.close();
            store<0>(work, place);
            store<1>(work, place);
        }
    }
};

template <class Traits>
MCP_DEVICE void backward_dq(const DqParams& params) {
    const DqShared<Traits> shared;
    const int warpgroup = uniform(static_cast<i32>(ptx::thread_index()) / kWarpgroupSize);
    if (ptx::thread_index() == 0) shared.init_barriers();
    ptx::sync_threads();
    if (warpgroup == 0) {
        ptx::set_max_registers_down<Traits::kProducerRegisters>();
        if (uniform(static_cast<i32>(ptx::thread_index()) / kWarpSize) == 0) {
            DqProducer<Traits>(params, shared).run();
        }
    } else {
        ptx::set_max_registers_up<Traits::kConsumerRegisters>();
        DqConsumer<Traits>(params, shared, warpgroup - 1).run();
    }
}

}  // namespace mcp::attn
