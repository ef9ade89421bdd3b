// The two warps of the backward kernel that move data: the loader fills shared memory, the storer
// adds dq tiles to global memory. Both walk the same sequence of query tiles as the consumers: for
// each query head of the item, each segment.
#pragma once

#include "bwd_shared.cuh"
#include "params.h"
#include "tile_iter.cuh"

namespace mcp::attn {

// All lanes wait, the leader alone issues, and not before all have waited (see the forward kernel's
// producer).
template <class Traits, class Shared>
struct BwdLoader {
    static constexpr int kRowChunks = Traits::kBlockN / kWarpSize;

    const BwdParams& params;
    const Shared& shared;
    bool leader;
    RingPosition<Traits::kQueryStages> queries_at;
    RingPosition<Traits::kDoutStages> dout_at;
    RingPosition<1> keys_at, mail_at, landed_at;

    MCP_DEVICE BwdLoader(const BwdParams& params, const Shared& shared)
        : params(params), shared(shared), leader(lane_index() == 0) {}

    // Bit c of lane l: key row 32 * c + l of the tile is in some segment.
    MCP_DEVICE u32 used_rows(const WorkItem& work) const {
        u32 used = 0;
        for (i32 s = work.seg0; s < work.seg0 + work.num_segs; s++) {
            const i32x4 rows = ptx::load_constant_i32x4(&params.segments[s].q0);
            MCP_UNROLL
            for (int c = 0; c < kRowChunks; c++) {
                const i32 row = work.row0 + c * kWarpSize + lane_index();
                used |= static_cast<u32>(row >= rows.x && row < rows.y) << c;
            }
        }
        return used;
    }

    MCP_DEVICE void load_keys(const WorkItem& work) {
        // p and ds of an unused key are 0, but 0 * nan is nan: dq needs its row of k cleared, and
        // ds, as p times something, its row of v.
        const u32 used = used_rows(work);
        const bool clear = ptx::any_lane(used != (1u << kRowChunks) - 1);
        const u32 full = shared.key_ring.full(keys_at);
        const i32 kv_head = kv_head_of(params, work);
        shared.key_ring.wait_empty(keys_at);
        ptx::sync_warp();
        if (leader) {
            const u32 landed = clear ? shared.landed : full;
            ptx::mbarrier_arrive_expect_tx(landed, Traits::kKeyBytes + Traits::kValueBytes);
            load_panels(shared.keys(), &params.k_map, landed, kv_head, work.row0,
                        ptx::kEvictFirst);
            load_panels(shared.values(), &params.v_map, landed, kv_head, work.row0,
                        ptx::kEvictFirst);
        }
        if (clear) {
            wait(shared.landed, landed_at.parity);
            landed_at.advance();
            clear_rows_but(shared.keys(), used);
            clear_rows_but(shared.values(), used);
            hand_over(full);
        }
        keys_at.advance();
    }

    // One tile of q or dout with its row statistics. Rows from `end` on have ds = p = 0, and are
    // cleared because of 0 * nan.
    template <class Tile, int kStages>
    MCP_DEVICE void load_rows(Tile tile,
                              const TensorMap* map,
                              u32 stats,
                              const TensorMap* stats_map,
                              Ring<kStages> ring,
                              RingPosition<kStages>& at,
                              i32 head,
                              const QueryTiles<Traits::kBlockM>& queries) {
        const i32 first = queries.first();
        const bool clear = first + Traits::kBlockM > queries.k1 && queries.k1 < params.num_queries;
        const u32 full = ring.full(at);
        ring.wait_empty(at);
        ptx::sync_warp();
        if (leader) {
            const u32 landed = clear ? shared.landed : full;
            ptx::mbarrier_arrive_expect_tx(landed, Tile::kBytes + Traits::kRowStatBytes);
            load_panels(tile, map, landed, head, first, ptx::kEvictLast);
            const i32 copy = first & (kStatCopies - 1);
            ptx::tma_load_3d(stats, stats_map, landed, first - copy, head, copy, ptx::kEvictLast);
        }
        if (clear) {
            wait(shared.landed, landed_at.parity);
            landed_at.advance();
            clear_rows(tile, queries.k1 - first);
            hand_over(full);
        }
        at.advance();
    }

    // After all lanes have written to a tile.
    MCP_DEVICE void hand_over(u32 full) const {
        ptx::fence_proxy_async();
        ptx::sync_warp();
        if (leader) ptx::mbarrier_arrive(full);
    }

    MCP_DEVICE void load_tiles(const WorkItem& work) {
        const i32 first = first_query_head_of(params, work);
        load_keys(work);
        for (i32 head = first; head < first + params.heads_per_item; head++) {
            QueryTiles<Traits::kBlockM> queries(params.segments, work);
            do {
                load_rows(shared.queries(queries_at.stage), &params.q_map,
                          shared.lse(queries_at.stage), &params.lse_map, shared.query_ring,
                          queries_at, head, queries);
                load_rows(shared.dout(dout_at.stage), &params.dout_map, shared.delta(dout_at.stage),
                          &params.delta_map, shared.dout_ring, dout_at, head, queries);
            } while (queries.advance());
        }
    }

    MCP_DEVICE void run() {
        const WorkQueue<BwdParams, false> queue = {params, leader};
        WorkItem work = queue.first();
        for (;;) {
            send(shared.mailbox(), shared.mail_ring, mail_at, leader, to_message(work));
            if (work.head < 0) break;
            if (work.num_segs > 0) load_tiles(work);
            work = queue.next();
        }
        queue.finish();
    }
};

// The order in which key tiles add to rows of dq, so that the sum has the same bits in every run: a
// slot of kBlockM rows is open to a segment when the slot's counter shows the number of the segment
// before it. One lane calls. What can be computed is not kept: the storer has 24 registers.
template <int kBlockM>
struct DqTurns {
    const BwdParams& params;
    i32 head;
    i32 run =
        0;  // of the segment: slots below turn_runs[run][0] are opened by segment turn_runs[run][1]

    MCP_DEVICE i32* counter(i32 slot) const {
        return params.turn_counters + static_cast<i64>(head) * params.num_slots + slot;
    }
    // Before adding to rows [first, end) of a segment whose first row is `begin`.
    MCP_DEVICE void take(i32 segment, i32 begin, i32 first, i32 end) {
        if (first == begin) run = params.turn_segments[3 * segment + 1];
        const i32 open = first == begin ? first / kBlockM : (first - 1) / kBlockM + 1;
        MCP_NO_UNROLL
        for (i32 slot = open; slot < (end - 1) / kBlockM + 1; slot++) {
            MCP_NO_UNROLL
            while (slot >= params.turn_runs[2 * run]) run++;
            const i32 before = params.turn_runs[2 * run + 1];
            while (ptx::load_acquire(counter(slot)) != before) {
            }
        }
        ptx::fence_proxy_async_global();
    }
    // Passes slots [slot, end_slot) on: the segment's writes to them are complete.
    MCP_DEVICE void give(i32 segment, i32 slot, i32 end_slot) const {
        ptx::fence_proxy_async_global();
        const i32 number = params.turn_segments[3 * segment];
        MCP_NO_UNROLL
        for (; slot < end_slot; slot++) ptx::store_release(counter(slot), number);
    }
};

constexpr int kF32PanelColumns = 32;

// dq tiles that come whole: both consumers have written to one buffer.
template <class Traits>
struct WholeDqTiles {
    static constexpr int kCopyGroups = 1;  // per tile
    static constexpr int kPanelBytes = Traits::kBlockM * kRowBytes;

    RingPosition<1> at;

    // Adds the next dq tile to rows from `first` of the head, and gives the buffer back. All lanes
    // of the storer call.
    template <class Shared>
    MCP_DEVICE void add(
        const BwdParams& params, const Shared& shared, bool leader, i32 head, i32 first) {
        wait(shared.dq_ring.full(at), at.parity);
        ptx::sync_warp();
        if (leader) {
            MCP_UNROLL
            for (int column = 0; column < Traits::kHeadDim; column += kF32PanelColumns) {
                ptx::tma_reduce_add_3d(&params.dq_map,
                                       shared.dq() + column / kF32PanelColumns * kPanelBytes,
                                       column, head, first);
            }
            ptx::tma_commit_group();
            ptx::tma_wait_group_read<0>();
            shared.dq_ring.release(at);
        }
        at.advance();
    }
};

template <class Traits, class Shared, class DqTiles>
struct BwdStorer {
    const BwdParams& params;
    const Shared& shared;
    bool leader;
    DqTiles dq;
    RingPosition<1> mail_at;

    MCP_DEVICE BwdStorer(const BwdParams& params, const Shared& shared)
        : params(params), shared(shared), leader(lane_index() == 0) {}

    template <bool kInTurn>
    MCP_DEVICE void store_tiles(const WorkItem& work, i32 head) {
        DqTurns<Traits::kBlockM> turns = {params, head};
        QueryTiles<Traits::kBlockM> queries(params.segments, work);
        bool more = true;
        while (more) {
            const i32 begin = queries.k0, first = queries.first();
            const i32 end = ptx::min(first + Traits::kBlockM, queries.k1);
            const i32 segment = static_cast<i32>(queries.next_segment - params.segments) - 1;
            more = queries.advance();
            const bool leaves = !more || queries.tile == 0;
            if (kInTurn && leader) turns.take(segment, begin, first, end);
            dq.add(params, shared, leader, head, first);
            if (kInTurn && leader) pass_turns(turns, segment, begin, first, leaves ? end : -1);
        }
    }

    // Slots are passed on one tile late, when their copies have had the time to complete; at the
    // end of a segment, `end`, all that are left.
    MCP_DEVICE void pass_turns(
        const DqTurns<Traits::kBlockM>& turns, i32 segment, i32 begin, i32 first, i32 end) const {
        const i32 slot = first / Traits::kBlockM;
        ptx::tma_wait_group<DqTiles::kCopyGroups>();
        turns.give(segment, ptx::max(slot - 1, begin / Traits::kBlockM), slot);
        if (end >= 0) {
            ptx::tma_wait_group<0>();
            turns.give(segment, slot, (end - 1) / Traits::kBlockM + 1);
        }
    }

    template <bool kInTurn>
    MCP_DEVICE void store_work() {
        for (;;) {
            const WorkItem work =
                to_work_item(receive<2>(shared.mailbox(), shared.mail_ring, mail_at));
            if (work.head < 0) break;
            if (work.num_segs == 0) continue;
            const i32 first = first_query_head_of(params, work);
            for (i32 head = first; head < first + params.heads_per_item; head++) {
                store_tiles<kInTurn>(work, head);
            }
        }
        if (leader) ptx::tma_wait_group<0>();
    }

    // Two copies, so that the usual one is spared the registers of the turns.
    MCP_DEVICE void run() {
        if (params.turn_runs == nullptr) {
            store_work<false>();
        } else {
            store_work<true>();
        }
    }
};

}  // namespace mcp::attn
