// Attention forward for Hopper. One CTA per multiprocessor runs
//
//     producer    q(0) k0 k1 v0 k2 v1 ... v(n-1)  q(1) ...        global -> shared memory by TMA
//     consumer 0  S0 | softmax | S1=QK1' O+=P0V0 | softmax .....  64 query rows each
//     consumer 1       S0 | ... softmax | S1=QK1' O+=P0V0 | softmax ...
//
// so that the products of one consumer run under the softmax of the other, and the product of
// probabilities and values of a key tile under the next softmax. A CTA takes query tiles from a
// counter until none is left. Every query row is in one tile, so nothing is added by two CTAs: the
// same bits in every run. Method: FlashAttention-3 (Shah et al. 2024), with the mask given as key
// segments.
#pragma once

#include <mcp/gemm.cuh>
#include <mcp/mailbox.cuh>
#include <mcp/ring.cuh>

#include "dropout.cuh"
#include "fwd_epilogue.cuh"
#include "key_producer.cuh"
#include "mask.cuh"
#include "params.h"
#include "segment_mail.cuh"
#include "softcap.cuh"
#include "softmax.cuh"
#include "tile_iter.cuh"
#include "traits.h"

namespace mcp::attn {

// Shared memory and its barriers. Consumer threads read the mailbox, wgmma reads the tiles.
//   ring     filled by                    emptied by (arrivals)       what a reader may read
//   queries  producer: bytes of q         1 lane per consumer warp    the q tile
//   keys     producer: bytes of k         1 thread per consumer       the stage's k tile
//   values   producer: bytes of v, or 1   1 thread per consumer       the stage's v tile
//            arrival after clearing rows
//   mail     producer: 1 arrival          1 lane per consumer warp    the slot's message
// `tail` is the producer's own: a v tile whose last rows it must clear has landed.
template <class Traits>
struct FwdShared {
    using Queries = Panels<Traits::kBlockM, Traits::kHeadDim>;
    using Keys = Panels<Traits::kBlockN, Traits::kHeadDim>;
    using Values = Panels<Traits::kBlockN, Traits::kValueDim>;
    using Stages = Ring<Traits::kStages>;
    using Mails = Ring<Traits::kMailSlots>;
    static constexpr int kConsumerWarps = Traits::kConsumers * kWarpsPerWarpgroup;
    static_assert(Traits::kMailBytes == Traits::kMailSlots * SegmentMail::kBytes &&
                      Traits::kRoomBytes == 16 * kRowBytes,
                  "traits.h and segment_mail.cuh or fwd_epilogue.cuh disagree");
    static_assert(Queries::kBytes == Traits::kQueryBytes && Keys::kBytes == Traits::kKeyBytes &&
                      Values::kBytes == Traits::kValueBytes,
                  "traits.h and panels.cuh disagree");

    u32 base;
    Ring<1> query_ring;
    Mails mail_ring;
    Stages key_ring, value_ring;
    u32 tail;

    MCP_DEVICE FwdShared() {
        base = (ptx::dynamic_shared() + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
        tail = place_rings<Traits::kNumBarriers>(base + Traits::kBarriersAt, query_ring, mail_ring,
                                                 key_ring, value_ring);
    }

    MCP_DEVICE Queries queries() const { return {base + Traits::kQueryAt}; }
    MCP_DEVICE Keys keys(int stage) const {
        return {base + Traits::kKeysAt + stage * Traits::kKeyBytes};
    }
    MCP_DEVICE Values values(int stage) const {
        return {base + Traits::kValuesAt + stage * Traits::kValueBytes};
    }
    // Of a consumer warp; where there is no other room, the rows of the queries that it alone
    // reads.
    MCP_DEVICE u32 out_room(int warp) const {
        return base + Traits::kOutAt + warp * Traits::kRoomBytes;
    }
    MCP_DEVICE u32 mailbox() const { return base + Traits::kMailboxAt; }

    // One thread; a CTA barrier must follow.
    MCP_DEVICE void init_barriers() const {
        query_ring.init(kConsumerWarps);
        key_ring.init(Traits::kConsumers);
        value_ring.init(Traits::kConsumers);
        mail_ring.init(kConsumerWarps);
        ptx::mbarrier_init(tail, 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();
    }
};

// --------------------------------------------------------------------------------------- producer

template <class Traits>
struct Producer : KeyProducer<Producer<Traits>, FwdParams, FwdShared<Traits>, Traits::kMailSlots> {
    using Base = KeyProducer<Producer<Traits>, FwdParams, FwdShared<Traits>, Traits::kMailSlots>;
    using Base::Base, Base::leader, Base::params, Base::post, Base::queries_at, Base::shared;
    using Position = RingPosition<Traits::kStages>;

    Position keys_at, values_at;

    MCP_DEVICE void load_queries(const WorkItem& work) {
        shared.query_ring.wait_empty(queries_at);
        ptx::sync_warp();
        if (leader) {
            const u32 full = shared.query_ring.full(queries_at);
            ptx::mbarrier_arrive_expect_tx(full, Traits::kQueryBytes);
            load_panels(shared.queries(), &params.q_map, full, work.head, work.row0,
                        ptx::kEvictFirst);
        }
        queries_at.advance();
    }

    // A work item without keys has no queries to load, but its rows leave through their rooms: the
    // queries of the next one must not be there yet.
    MCP_DEVICE void lend_queries() {
        if constexpr (Traits::kOutInQueries) {
            shared.query_ring.wait_empty(queries_at);
            ptx::sync_warp();
            if (leader) ptx::mbarrier_arrive(shared.query_ring.full(queries_at));
            queries_at.advance();
        }
    }

    MCP_DEVICE void load_keys(int kv_head, int first_key) {
        this->load(shared.key_ring, keys_at, shared.keys(keys_at.stage), &params.k_map, kv_head,
                   first_key);
    }
    MCP_DEVICE void load_values(int kv_head, int first_key, int end) {
        this->load(shared.value_ring, values_at, shared.values(values_at.stage), &params.v_map,
                   kv_head, first_key, end);
    }

    // Values follow one key tile behind: the consumers need the next keys first.
    MCP_DEVICE void load_tiles(const WorkItem& work) {
        const i32 kv_head = work.head / (params.num_heads / params.num_kv_heads);
        KeyTiles<Traits::kBlockN> keys(params.segments, work);
        i32 first_key, end;
        post(to_mail(work, keys));
        load_queries(work);
        load_keys(kv_head, keys.first());
        for (;;) {
            const i32 segments_left = keys.segments_left;
            first_key = keys.first(), end = keys.k1;
            if (!keys.advance()) break;
            if (keys.segments_left != segments_left) post(to_mail(work, keys));
            load_keys(kv_head, keys.first());
            load_values(kv_head, first_key, end);
        }
        load_values(kv_head, first_key, end);
    }
};

// -------------------------------------------------------------------------------------- consumers

// Consumers issue their products in turn, so that the tensor cores work for one while the others do
// softmax. Named barrier 1 + consumer: 128 threads of the consumer before arrive, its own 128 wait.
template <int kConsumers>
struct ConsumerTurns {
    static constexpr int kThreads = 2 * kWarpgroupSize;
    int consumer;

    // The first turn is consumer 0's: the last consumer passes it on.
    MCP_DEVICE void begin() const {
        if (consumer == kConsumers - 1) ptx::named_barrier_arrive<kThreads>(1);
    }
    MCP_DEVICE void take() const { ptx::named_barrier_sync<kThreads>(1 + consumer); }
    MCP_DEVICE void pass() const {
        ptx::named_barrier_arrive<kThreads>(1 + (consumer + 1) % kConsumers);
    }
    // Consumer 0 takes the turn that is left over, so that no arrival stays behind.
    MCP_DEVICE void end() const {
        if (consumer == 0) ptx::named_barrier_sync<kThreads>(1);
    }
};

// A warpgroup that owns 64 query rows of the tile.
template <class Traits>
struct Consumer {
    using T = typename Traits::T;
    using Shared = FwdShared<Traits>;
    using Position = RingPosition<Traits::kStages>;

    const FwdParams& params;
    const Shared& shared;
    int consumer;
    bool speaker;  // the thread that arrives for the warpgroup
    ConsumerTurns<Traits::kConsumers> turns;
    Position keys_at, values_at;
    RingPosition<1> queries_at;
    MailedKeys<Traits::kBlockN, Traits::kMailSlots> keys;

    float out[Traits::kValueDim / 2];
    u32 probs[Traits::kBlockN / 4];
    OnlineSoftmax softmax;
    RowWords words;

    MCP_DEVICE Consumer(const FwdParams& params, const Shared& shared, int consumer)
        : params(params),
          shared(shared),
          consumer(consumer),
          speaker(thread_in_warpgroup() == 0),
          turns{consumer},
          keys(shared.mailbox(), shared.mail_ring) {}

    // Scores are a variable of the tile: of a member the compiler would keep 64 registers from one
    // work item to the next.
    using Scores = float[Traits::kBlockN / 2];

    MCP_DEVICE void issue_scores(Scores& scores) {
        issue_a_bt<T>(scores, shared.queries(), consumer * 64, shared.keys(keys_at.stage));
    }
    MCP_DEVICE VisiblePairs visible_keys(FragmentPlace place) const {
        return visible_pairs<Traits::kBlockN / 4>(keys.bounds(), place);
    }
    MCP_DEVICE void issue_output() { issue_p_b<T>(out, probs, shared.values(values_at.stage)); }

    // Hidden keys, only in masked tiles, may hold NaN, which must not reach their neighbours.
    template <bool kMasked>
    MCP_DEVICE void cap_scores(Scores& scores) const {
        MCP_UNROLL
        for (int group = 0; group < Traits::kBlockN / 2 / kCapGroup; group++) {
            float r[kCapGroup];
            cap_reciprocals<!kMasked>(r, scores, group, params.cap_scale);
            MCP_UNROLL
            for (int i = 0; i < kCapGroup; i++) {
                scores[cap_register(group, i)] = ptx::fma(-2.0f * params.cap, r[i], params.cap);
            }
        }
    }

    // Scores -> probabilities in place; `rescale` for what was summed before.
    template <bool kMasked>
    MCP_DEVICE void apply_softmax(Scores& scores,
                                  const VisiblePairs& visible,
                                  float (&rescale)[2]) {
        if constexpr (Traits::kSoftcap) cap_scores<kMasked>(scores);
        if constexpr (kMasked) apply_mask(scores, visible, negative_infinity());
        softmax.template step<kMasked>(scores, params.score_scale, rescale);
    }

    // What dropout keeps of the tile that is `ahead` further on than `keys`: found while its scores
    // are multiplied.
    MCP_DEVICE VisiblePairs kept_keys(FragmentPlace place, i32 ahead) const {
        if constexpr (!Traits::kDropout) return {};
        const i32 first = keys.first() - ahead * Traits::kBlockN + place.column;
        return kept_pairs<Traits::kBlockN / 4>(words, params.dropout.key_words + first,
                                               params.dropout.threshold);
    }
    MCP_DEVICE void drop_some(Scores& probs, const VisiblePairs& kept) const {
        if constexpr (Traits::kDropout) drop(probs, kept, params.dropout.scale);
    }

    // The first key tile has no earlier product to overlap with.
    MCP_DEVICE void first_tile(FragmentPlace place) {
        Scores scores;
        float rescale[2];
        shared.key_ring.wait_full(keys_at);
        issue_scores(scores);
        const VisiblePairs visible = visible_keys(place);
        const VisiblePairs kept = kept_keys(place, 0);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(scores);
        if (speaker) shared.key_ring.release(keys_at);
        keys_at.advance();
        apply_softmax<true>(scores, visible, rescale);
        if (params.earlier != nullptr) begin_output(out, softmax, rescale);
        drop_some(scores, kept);
        pack<T>(probs, scores);
    }

    // Scores of this key tile, while the output of the one before is still being multiplied.
    template <bool kMasked>
    MCP_DEVICE void next_tile(FragmentPlace place, i32 ahead) {
        Scores scores;
        float rescale[2];
        shared.key_ring.wait_full(keys_at);
        turns.take();
        issue_scores(scores);
        shared.value_ring.wait_full(values_at);
        issue_output();
        turns.pass();
        VisiblePairs visible;
        if constexpr (kMasked) visible = visible_keys(place);
        const VisiblePairs kept = kept_keys(place, ahead);
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(scores);
        apply_softmax<kMasked>(scores, visible, rescale);
        // Always true. It makes the arrival depend on the first row's maximum, or ptxas moves the
        // wait below above it and the product of probabilities and values overlaps with nothing.
        // Further down, exponentials are left to overlap with rescaling and packing.
        const bool has_maximum = rescale[0] != -1.0f;
        if (speaker && has_maximum) shared.key_ring.release(keys_at);
        keys_at.advance();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(out);
        if (speaker) shared.value_ring.release(values_at);
        values_at.advance();
        drop_some(scores, kept);
        pack<T>(probs, scores);
        scale_rows(out, rescale);
    }

    MCP_DEVICE void release_queries() {
        if constexpr (Traits::kOutInQueries) ptx::fence_proxy_async();
        give_back(shared.query_ring, queries_at);
    }

    // All key tiles; the last product of probabilities and values is issued.
    MCP_DEVICE void visit_keys(FragmentPlace place) {
        shared.query_ring.wait_full(queries_at);
        first_tile(place);
        bool more = keys.advance(1);
        MCP_NO_UNROLL
        while (more) {
            const i32 num_full = keys.num_full();
            if (num_full > 0) {
                MCP_NO_UNROLL
                for (i32 left = num_full; left > 0; left--)
                    next_tile<false>(place, num_full - left);
                more = keys.advance(num_full);
            } else {
                next_tile<true>(place, 0);
                more = keys.advance(1);
            }
        }
        if constexpr (!Traits::kOutInQueries) release_queries();
        shared.value_ring.wait_full(values_at);
        issue_output();
    }

    MCP_DEVICE void finish_output() {
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(out);
        if (speaker) shared.value_ring.release(values_at);
        values_at.advance();
    }

    MCP_DEVICE void visit(const WorkItem& work) {
        FragmentPlace place = fragment_place();
        place.row += work.row0 + consumer * 64;
        float factor[2] = {1.0f, 1.0f};
        load_earlier(params, work, place, out, softmax);
        if constexpr (Traits::kDropout) {
            words.load(words_of_head(params.dropout, work.head) + place.row);
        }
        if (work.num_segs > 0) {
            visit_keys(place);
            keys.close();
            if (params.max_logits != nullptr) raise_max_logit(params, work, place, softmax);
            // While the output is still being multiplied.
            finish_rows(params, work, place, softmax, factor);
            finish_output();
        } else {
            keys.close();
            if constexpr (Traits::kOutInQueries) shared.query_ring.wait_full(queries_at);
            begin_output(out, softmax, factor);
            finish_rows(params, work, place, softmax, factor);
        }
        store(work, factor);
        if constexpr (Traits::kOutInQueries) release_queries();
    }

    MCP_DEVICE void store(const WorkItem& work, const float (&factor)[2]) const {
        const int warp = uniform(thread_in_warpgroup() / kWarpSize);
        const u32 room = shared.out_room(consumer * kWarpsPerWarpgroup + warp);
        const OutRows rows(params, work, work.row0 + consumer * 64 + warp * 16, room);
        if (params.out_is_float) {
            store_f32(out, factor, rows);
        } else {
            store_16<T>(out, factor, rows);
        }
    }

    MCP_DEVICE void run() {
        turns.begin();
        for (;;) {
            const WorkItem work = keys.open();
            if (work.head < 0) break;
            visit(work);
        }
        turns.end();
    }
};

template <class Traits>
MCP_DEVICE void forward(const FwdParams& params) {
    const FwdShared<Traits> shared;
    const int warpgroup = uniform(static_cast<i32>(ptx::thread_index()) / kWarpgroupSize);
    if (ptx::thread_index() == 0) {
        shared.init_barriers();
        ptx::tma_prefetch_map(&params.q_map);
        ptx::tma_prefetch_map(&params.k_map);
        ptx::tma_prefetch_map(&params.v_map);
    }
    ptx::sync_threads();
    if (warpgroup == 0) {
        ptx::set_max_registers_down<Traits::kProducerRegisters>();
        if (uniform(static_cast<i32>(ptx::thread_index()) / kWarpSize) == 0) {
            Producer<Traits>(params, shared).run();
        }
    } else {
        ptx::set_max_registers_up<Traits::kConsumerRegisters>();
        Consumer<Traits>(params, shared, warpgroup - 1).run();
    }
}

}  // namespace mcp::attn
