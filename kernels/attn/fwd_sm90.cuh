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

#include "fwd_epilogue.cuh"
#include "mask.cuh"
#include "params.h"
#include "softmax.cuh"
#include "tile_iter.cuh"
#include "traits.h"

namespace mcp::attn {

// Shared memory and its barriers. Consumer threads read the mailbox, wgmma reads the tiles.
//   ring     filled by                    emptied by (arrivals)       what a reader may read
//   queries  producer: bytes of q         1 thread per consumer       the q tile
//   keys     producer: bytes of k         1 thread per consumer       the stage's k tile
//   values   producer: bytes of v, or 1   1 thread per consumer       the stage's v tile
//            arrival after clearing rows
//   mail     producer: 1 arrival          1 lane per consumer warp    the mailbox
// `tail` is the producer's own: a v tile whose last rows it must clear has landed.
template <class Traits>
struct FwdShared {
    using Queries = Panels<Traits::kBlockM, Traits::kHeadDim>;
    using Keys = Panels<Traits::kBlockN, Traits::kHeadDim>;
    using Values = Panels<Traits::kBlockN, Traits::kValueDim>;
    using Stages = Ring<Traits::kStages>;
    static_assert(Queries::kBytes == Traits::kQueryBytes && Keys::kBytes == Traits::kKeyBytes &&
                      Values::kBytes == Traits::kValueBytes,
                  "traits.h and panels.cuh disagree");

    u32 base;
    Ring<1> query_ring, mail_ring;
    Stages key_ring, value_ring;
    u32 tail;

    MCP_DEVICE FwdShared() {
        base = (ptx::dynamic_shared() + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
        query_ring.barriers = base + Traits::kBarriersAt;
        mail_ring.barriers = query_ring.barriers + Ring<1>::kBytes;
        key_ring.barriers = mail_ring.barriers + Ring<1>::kBytes;
        value_ring.barriers = key_ring.barriers + Stages::kBytes;
        tail = value_ring.barriers + Stages::kBytes;
        static_assert(2 * Ring<1>::kBytes + 2 * Stages::kBytes + 8 == 8 * Traits::kNumBarriers, "");
    }

    MCP_DEVICE Queries queries() const { return {base + Traits::kQueryAt}; }
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
        mail_ring.init(Traits::kConsumers * kWarpsPerWarpgroup);
        ptx::mbarrier_init(tail, 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();
    }
};

// --------------------------------------------------------------------------------------- producer

// The one warp that fills shared memory. All lanes wait, the leader alone issues, and not before
// all have waited: a lane that came late could find that the leader's work has completed the phase
// a second time.
template <class Traits>
struct Producer {
    using Shared = FwdShared<Traits>;
    using Position = RingPosition<Traits::kStages>;

    const FwdParams& params;
    const Shared& shared;
    bool leader;
    Position keys_at, values_at;
    RingPosition<1> queries_at, mail_at, tail_at;

    MCP_DEVICE Producer(const FwdParams& params, const Shared& shared)
        : params(params), shared(shared), leader(lane_index() == 0) {}

    MCP_DEVICE void post(const WorkItem& work) {
        send(shared.mailbox(), shared.mail_ring, mail_at, leader, to_message(work));
    }

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

    MCP_DEVICE void load_keys(int kv_head, int first_key) {
        shared.key_ring.wait_empty(keys_at);
        ptx::sync_warp();
        if (leader) {
            const u32 full = shared.key_ring.full(keys_at);
            ptx::mbarrier_arrive_expect_tx(full, Traits::kKeyBytes);
            load_panels(shared.keys(keys_at.stage), &params.k_map, full, kv_head, first_key,
                        ptx::kEvictLast);
        }
        keys_at.advance();
    }

    // Rows from `end` on have probability 0, but 0 * nan is nan, and a row outside every slice may
    // hold anything: they are cleared. (Scores of such keys are replaced by the mask, and rows past
    // the tensor are zeros already.)
    MCP_DEVICE void load_values(int kv_head, int first_key, int end) {
        const bool has_tail = first_key + Traits::kBlockN > end && end < params.num_keys;
        const u32 full = shared.value_ring.full(values_at);
        const auto tile = shared.values(values_at.stage);
        shared.value_ring.wait_empty(values_at);
        ptx::sync_warp();
        if (leader) {
            const u32 landed = has_tail ? shared.tail : full;
            ptx::mbarrier_arrive_expect_tx(landed, Traits::kValueBytes);
            load_panels(tile, &params.v_map, landed, kv_head, first_key, ptx::kEvictLast);
        }
        if (has_tail) {
            wait(shared.tail, tail_at.parity);
            tail_at.advance();
            clear_rows(tile, end - first_key);
            ptx::fence_proxy_async();
            ptx::sync_warp();
            if (leader) ptx::mbarrier_arrive(full);
        }
        values_at.advance();
    }

    // Values follow one key tile behind: the consumers need the next keys first.
    MCP_DEVICE void load_tiles(const WorkItem& work) {
        const i32 kv_head = work.head / (params.num_heads / params.num_kv_heads);
        KeyTiles<Traits::kBlockN> keys(params.segments, work);
        i32 first_key, end;
        load_queries(work);
        load_keys(kv_head, keys.first());
        for (;;) {
            first_key = keys.first(), end = keys.k1;
            if (!keys.advance()) break;
            load_keys(kv_head, keys.first());
            load_values(kv_head, first_key, end);
        }
        load_values(kv_head, first_key, end);
    }

    MCP_DEVICE void run() {
        const WorkQueue<FwdParams, true> queue = {params, leader};
        WorkItem work = queue.first();
        for (;;) {
            post(work);
            if (work.head < 0) break;
            if (work.num_segs > 0) load_tiles(work);
            work = queue.next();
        }
        queue.finish();
    }
};

// -------------------------------------------------------------------------------------- consumers

// Consumers issue their products in turn, so that the tensor cores work for one while the others do
// softmax. Named barrier 1 + consumer: 128 threads of the consumer before arrive, its own 128 wait.
template <bool kOn, int kConsumers>
struct ConsumerTurns {
    static constexpr int kThreads = 2 * kWarpgroupSize;
    int consumer;

    // The first turn is consumer 0's: the last consumer passes it on.
    MCP_DEVICE void begin() const {
        if (kOn && consumer == kConsumers - 1) ptx::named_barrier_arrive<kThreads>(1);
    }
    MCP_DEVICE void take() const {
        if constexpr (kOn) ptx::named_barrier_sync<kThreads>(1 + consumer);
    }
    MCP_DEVICE void pass() const {
        if constexpr (kOn) ptx::named_barrier_arrive<kThreads>(1 + (consumer + 1) % kConsumers);
    }
    // Consumer 0 takes the turn that is left over, so that no arrival stays behind.
    MCP_DEVICE void end() const {
        if (kOn && consumer == 0) ptx::named_barrier_sync<kThreads>(1);
    }
};

// A warpgroup that owns 64 query rows of the tile.
template <class Traits>
struct Consumer {
    using T = typename Traits::T;
    using Shared = FwdShared<Traits>;
    using Keys = KeyTiles<Traits::kBlockN>;
    using Position = RingPosition<Traits::kStages>;

    const FwdParams& params;
    const Shared& shared;
    int consumer;
    bool speaker;  // the thread that arrives for the warpgroup
    ConsumerTurns<Traits::kPingPong, Traits::kConsumers> turns;
    Position keys_at, values_at;
    RingPosition<1> queries_at, mail_at;

    float scores[Traits::kBlockN / 2];
    float out[Traits::kValueDim / 2];
    u32 probs[Traits::kBlockN / 4];
    OnlineSoftmax softmax;

    MCP_DEVICE Consumer(const FwdParams& params, const Shared& shared, int consumer)
        : params(params),
          shared(shared),
          consumer(consumer),
          speaker(thread_in_warpgroup() == 0),
          turns{consumer} {}

    MCP_DEVICE void issue_scores() {
        issue_a_bt<T>(scores, shared.queries(), consumer * 64, shared.keys(keys_at.stage));
    }
    MCP_DEVICE void issue_output() { issue_p_b<T>(out, probs, shared.values(values_at.stage)); }

    // Scores -> probabilities in place; `rescale` for what was summed before.
    template <bool kMasked>
    MCP_DEVICE void apply_softmax(const Keys& keys, FragmentPlace place, float (&rescale)[2]) {
        if constexpr (Traits::kSoftcap) cap_scores(scores, params);
        if constexpr (kMasked) apply_mask(scores, keys, place, negative_infinity());
        softmax.template step<kMasked>(scores, params.score_scale, rescale);
    }

    // The first key tile has no earlier product to overlap with.
    MCP_DEVICE void first_tile(const Keys& keys, FragmentPlace place) {
        float rescale[2];
        shared.key_ring.wait_full(keys_at);
        issue_scores();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(scores);
        if (speaker) shared.key_ring.release(keys_at);
        keys_at.advance();
        apply_softmax<true>(keys, place, rescale);
        pack<T>(probs, scores);
    }

    // Scores of this key tile, while the output of the one before is still being multiplied.
    template <bool kMasked>
    MCP_DEVICE void next_tile(const Keys& keys, FragmentPlace place) {
        float rescale[2];
        shared.key_ring.wait_full(keys_at);
        turns.take();
        issue_scores();
        shared.value_ring.wait_full(values_at);
        issue_output();
        turns.pass();
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(scores);
        apply_softmax<kMasked>(keys, place, rescale);
        // Always true. It makes the arrival depend on the softmax of one row, or ptxas moves the
        // wait below above most of it and the product of probabilities and values overlaps with
        // nothing. With both rows before the wait, rescaling would overlap with nothing.
        const bool softmax_done = softmax.sum[0] != -1.0f;
        if (speaker && softmax_done) shared.key_ring.release(keys_at);
        keys_at.advance();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(out);
        if (speaker) shared.value_ring.release(values_at);
        values_at.advance();
        pack<T>(probs, scores);
        scale_rows(out, rescale);
    }

    MCP_DEVICE void last_output() {
        shared.value_ring.wait_full(values_at);
        issue_output();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(out);
        if (speaker) shared.value_ring.release(values_at);
        values_at.advance();
    }

    MCP_DEVICE void visit_keys(const WorkItem& work, FragmentPlace place) {
        Keys keys(params.segments, work);
        shared.query_ring.wait_full(queries_at);
        first_tile(keys, place);
        bool more = keys.advance();
        MCP_NO_UNROLL
        while (more) {
            if (keys.is_full()) {
                MCP_NO_UNROLL
                do {
                    next_tile<false>(keys, place);
                    more = keys.advance();
                } while (more && keys.is_full());
            } else {
                next_tile<true>(keys, place);
                more = keys.advance();
            }
        }
        if (speaker) shared.query_ring.release(queries_at);
        queries_at.advance();
        last_output();
    }

    MCP_DEVICE void run() {
        turns.begin();
        for (;;) {
            const WorkItem work =
                to_work_item(receive(shared.mailbox(), shared.mail_ring, mail_at));
            if (work.head < 0) break;
            FragmentPlace place = fragment_place();
            place.row += work.row0 + consumer * 64;
            softmax.reset();
            fill(out, 0.0f);
            if (work.num_segs > 0) visit_keys(work, place);
            store_rows<T>(params, work, place, out, softmax);
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
