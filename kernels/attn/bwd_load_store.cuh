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
    static constexpr int kRowChunks = (Traits::kBlockN + kWarpSize - 1) / kWarpSize;

    const BwdParams& params;
    const Shared& shared;
    bool leader;
    RingPosition<Traits::kStages> queries_at;
    RingPosition<Traits::kDoutStages> dout_at;
    RingPosition<1> keys_at, mail_at, landed_at;

    MCP_DEVICE BwdLoader(const BwdParams& params, const Shared& shared)
        : params(params), shared(shared), leader(lane_index() == 0) {}

    // Bit c of lane l: key row 32 * c + l of the tile is in some segment, or does not exist.
    MCP_DEVICE u32 used_rows(const WorkItem& work) const {
        constexpr int kLastRows = Traits::kBlockN % kWarpSize;
        u32 used = kLastRows != 0 && lane_index() >= kLastRows ? 1u << (kRowChunks - 1) : 0;
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
            load_panels(shared.keys(), &params.k_map, landed, kv_head, work.row0, ptx::kEvictFirst);
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
            clear_stats(stats, queries.k1 - first);
            hand_over(full);
        }
        at.advance();
    }

    // A row that sees nothing but a sink has a finite lse: its delta is nan where its dout is.
    MCP_DEVICE void clear_stats(u32 stats, i32 first_row) const {
        for (i32 row = first_row + lane_index(); row < Traits::kBlockM; row += kWarpSize) {
            ptx::store_shared_f32(stats + 4 * row, 0.0f);
        }
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
        const WorkQueue<BwdParams> queue = {params, leader};
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

constexpr int kF32PanelColumns = 32;

// Adds dq tiles to global memory, room by room of kDqColumns columns, which consumers have filled.
template <class Traits, class Shared>
struct BwdStorer {
    static constexpr int kPanelBytes = Traits::kBlockM * kRowBytes;

    const BwdParams& params;
    const Shared& shared;
    bool leader;
    RingPosition<Traits::kDqStages> dq_at;
    RingPosition<1> mail_at;

    MCP_DEVICE BwdStorer(const BwdParams& params, const Shared& shared)
        : params(params), shared(shared), leader(lane_index() == 0) {}

    // Adds the next room to rows from `first` of the head, and gives it back.
    MCP_DEVICE void add(i32 head, i32 first, i32 first_column) {
        wait(shared.dq_ring.full(dq_at), dq_at.parity);
        ptx::sync_warp();
        if (leader) {
            MCP_UNROLL
            for (int column = 0; column < Traits::kDqColumns; column += kF32PanelColumns) {
                ptx::tma_reduce_add_3d(
                    &params.dq_map,
                    shared.dq(dq_at.stage) + column / kF32PanelColumns * kPanelBytes,
                    first_column + column, head, first);
            }
            ptx::tma_commit_group();
            ptx::tma_wait_group_read<0>();
            shared.dq_ring.release(dq_at);
        }
        dq_at.advance();
    }

    MCP_DEVICE void store_tiles(const WorkItem& work, i32 head) {
        QueryTiles<Traits::kBlockM> queries(params.segments, work);
        do {
            MCP_UNROLL
            for (int column = 0; column < Traits::kHeadDim; column += Traits::kDqColumns) {
                add(head, queries.first(), column);
            }
        } while (queries.advance());
    }

    MCP_DEVICE void run() {
        for (;;) {
            const WorkItem work =
                to_work_item(receive<2>(shared.mailbox(), shared.mail_ring, mail_at));
            if (work.head < 0) break;
            if (work.num_segs == 0) continue;
            const i32 first = first_query_head_of(params, work);
            for (i32 head = first; head < first + params.heads_per_item; head++) {
                store_tiles(work, head);
            }
        }
        if (leader) ptx::tma_wait_group<0>();
    }
};

// What a CTA does: warpgroup 0 moves data, each other one runs `consume(shared, warpgroup)`.
template <class Traits, class Shared, class Consume>
MCP_DEVICE void move_and_consume(const BwdParams& params, Consume consume) {
    const Shared shared;
    const int warpgroup = uniform(static_cast<i32>(ptx::thread_index()) / kWarpgroupSize);
    const int warp = uniform(static_cast<i32>(ptx::thread_index()) / kWarpSize);
    if (ptx::thread_index() == 0) shared.init_barriers();
    ptx::sync_threads();
    if (warpgroup == 0) {
        ptx::set_max_registers_down<Traits::kProducerRegisters>();
        if (warp == 0) BwdLoader<Traits, Shared>(params, shared).run();
        if constexpr (Traits::kAddsDq) {
            if (warp == 1) BwdStorer<Traits, Shared>(params, shared).run();
        }
    } else {
        consume(shared, warpgroup);
    }
}

}  // namespace mcp::attn
