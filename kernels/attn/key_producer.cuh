// What the producers of the forward kernel and of dq share: one warp that fills shared memory for
// consumers that own query tiles, while key tiles pass by.
#pragma once

#include <mcp/mailbox.cuh>
#include <mcp/panels.cuh>
#include <mcp/ring.cuh>

#include "params.h"
#include "segment_mail.cuh"
#include "tile_iter.cuh"

namespace mcp::attn {

// `Producer` derives from this and has load_tiles(work). All lanes wait, the leader alone issues,
// and not before all have waited: a lane that came late could find that the leader's work has
// completed the phase a second time.
template <class Producer, class Params, class Shared, int kMailSlots>
struct KeyProducer {
    const Params& params;
    const Shared& shared;
    bool leader;
    RingPosition<1> queries_at, tail_at;
    RingPosition<kMailSlots> mail_at;

    MCP_DEVICE KeyProducer(const Params& params, const Shared& shared)
        : params(params), shared(shared), leader(lane_index() == 0) {}

    MCP_DEVICE void post(const SegmentMail& mail) {
        send(shared.mailbox(), shared.mail_ring, mail_at, leader, mail);
    }

    // A tile of keys or values into the stage of its ring. It is multiplied with what is 0 for rows
    // from `end` on, but 0 * nan is nan, and a row outside every slice may hold anything: they are
    // cleared. (Rows past the tensor are zeros already.)
    template <class Tile, int kStages>
    MCP_DEVICE void load(Ring<kStages> ring,
                         RingPosition<kStages>& at,
                         Tile tile,
                         const TensorMap* map,
                         int kv_head,
                         int first_key,
                         int end) {
        const bool has_tail = first_key + Tile::kRows > end && end < params.num_keys;
        const u32 full = ring.full(at);
        ring.wait_empty(at);
        ptx::sync_warp();
        if (leader) {
            const u32 landed = has_tail ? shared.tail : full;
            ptx::mbarrier_arrive_expect_tx(landed, Tile::kBytes);
            load_panels(tile, map, landed, kv_head, first_key, ptx::kEvictLast);
        }
        if (has_tail) {
            wait(shared.tail, tail_at.parity);
            tail_at.advance();
            clear_rows(tile, end - first_key);
            ptx::fence_proxy_async();
            ptx::sync_warp();
            if (leader) ptx::mbarrier_arrive(full);
        }
        at.advance();
    }

    // The same where every row may stay as it is.
    template <class Tile, int kStages>
    MCP_DEVICE void load(Ring<kStages> ring,
                         RingPosition<kStages>& at,
                         Tile tile,
                         const TensorMap* map,
                         int kv_head,
                         int first_key) {
        load(ring, at, tile, map, kv_head, first_key, first_key + Tile::kRows);
    }

    // For consumers of a work item without keys that use the rows of the queries as rooms.
    MCP_DEVICE void lend_queries() {}

    MCP_DEVICE void run() {
        const WorkQueue<Params> queue = {params, leader};
        WorkItem work = queue.first();
        while (work.head >= 0) {
            if (work.num_segs > 0) {
                static_cast<Producer*>(this)->load_tiles(work);
            } else {
                post(to_mail(work));
                static_cast<Producer*>(this)->lend_queries();
            }
            work = queue.next();
        }
        post(to_mail(work));
        queue.finish();
    }
};

}  // namespace mcp::attn
