// Which work a CTA takes next, and the key tiles of one work item in the order in which all roles
// visit them.
#pragma once

#include <mcp/mailbox.cuh>
#include <mcp/platform.cuh>

#include "params.h"

namespace mcp::attn {

// One tile of one head: query rows of a query head in the forward pass, keys of a kv head in the
// backward; or, there, of a part of the query heads that share it.
struct WorkItem {
    i32 row0, rows, seg0, num_segs;
    i32 head;  // -1: no work is left
};

using WorkMessage = Message<2>;

MCP_DEVICE WorkMessage to_message(const WorkItem& work) {
    return {{{work.row0, work.rows, work.seg0, work.num_segs}, {work.head, 0, 0, 0}}};
}
MCP_DEVICE WorkItem to_work_item(const WorkMessage& message) {
    const i32x4 a = message.part[0];
    return {uniform(a.x), uniform(a.y), uniform(a.z), uniform(a.w), uniform(message.part[1].x)};
}

MCP_DEVICE i32 num_work_heads(const FwdParams& params) {
    return params.num_heads;
}
MCP_DEVICE i32 num_work_heads(const DqParams& params) {
    return params.num_heads;
}
MCP_DEVICE i32 num_work_heads(const BwdParams& params) {
    return params.num_kv_heads * params.items_per_group;
}
MCP_DEVICE i32 kv_head_of(const BwdParams& params, const WorkItem& work) {
    return work.head / params.items_per_group;
}
MCP_DEVICE i32 first_query_head_of(const BwdParams& params, const WorkItem& work) {
    return work.head * params.heads_per_item;
}

// Work items are numbered head section by head section, so that the keys and values in use fit the
// second-level cache; in a section tile by tile, longest first, so that the last CTA to finish does
// so early; heads innermost.
template <class Params>
MCP_DEVICE WorkItem work_item(const Params& params, i32 index) {
    if (index >= params.num_tiles * num_work_heads(params)) return {0, 0, 0, 0, -1};
    const i32 section = index / (params.num_tiles * params.heads_per_section);
    const i32 first_head = section * params.heads_per_section;
    const i32 num_heads = ptx::min(params.heads_per_section, num_work_heads(params) - first_head);
    const i32 in_section = index - first_head * params.num_tiles;
    const i32 rank = in_section / num_heads;
    const i32 tile = ptx::load_constant_i32(params.order + rank);
    const i32x4 t = ptx::load_constant_i32x4(params.tiles + tile);
    return {t.x, t.y, t.z, t.w, first_head + in_section - rank * num_heads};
}

// Gives out work items to the CTAs of a launch from a counter, the first by block index, which
// saves a CTA one trip to memory at its start. All lanes of one warp call.
template <class Params>
struct WorkQueue {
    const Params& params;
    bool leader;  // true in lane 0 only

    MCP_DEVICE WorkItem first() const {
        return work_item(params, static_cast<i32>(ptx::block_index()));
    }
    MCP_DEVICE WorkItem next() const {
        i32 taken = 0;
        if (leader) taken = ptx::atomic_add(params.counters, 1);
        return work_item(params, static_cast<i32>(ptx::num_blocks()) + uniform(taken));
    }
    // The last CTA to come here leaves the counters as the launch found them.
    MCP_DEVICE void finish() const {
        const i32 num_blocks = static_cast<i32>(ptx::num_blocks());
        if (leader && ptx::atomic_add(params.counters + 1, 1) == num_blocks - 1) {
            ptx::store_global<i32>(params.counters, 0);
            ptx::store_global<i32>(params.counters + 1, 0);
        }
    }
};

enum class Direction { kUpwards, kDownwards };

// Which pairs a segment allows in a tile whose first column is `first`; the rest as in Segment.
struct MaskBounds {
    i32 first;
    i32 k0, k1, lo, hi, q0, q1;
};

// Walks the segments of a work item with at least one, each in tiles of `kStep`. Every warp of
// every role sees the same sequence. In the forward pass it steps through keys, downwards, as a
// causal mask ends in the last tile; in the backward pass through queries, upwards, as it begins in
// the first.
template <int kStep, Direction kDirection>
struct SegmentTiles {
    const Segment* next_segment;
    i32 segments_left;  // after this one
    i32 tile;           // index in the segment
    i32 k0, k1, lo, hi, q0, q1, full_begin, full_end;

    MCP_DEVICE SegmentTiles(const Segment* segments, const WorkItem& work)
        : next_segment(segments + work.seg0), segments_left(work.num_segs) {
        enter_segment();
    }

    MCP_DEVICE void enter_segment() {
        const i32x4 a = ptx::load_constant_i32x4(next_segment);
        const i32x4 b = ptx::load_constant_i32x4(reinterpret_cast<const i32x4*>(next_segment) + 1);
        k0 = uniform(a.x), k1 = uniform(a.y), lo = uniform(a.z), hi = uniform(a.w);
        q0 = uniform(b.x), q1 = uniform(b.y), full_begin = uniform(b.z), full_end = uniform(b.w);
        tile = kDirection == Direction::kUpwards ? 0 : (k1 - k0 - 1) / kStep;
        next_segment++;
        segments_left--;
    }

    // Moves on by `num_tiles` tiles of this segment; false if no tile is left.
    MCP_DEVICE bool advance(i32 num_tiles = 1) {
        if (kDirection == Direction::kUpwards) {
            tile += num_tiles;
            if (first() < k1) return true;
        } else {
            tile -= num_tiles;
            if (tile >= 0) return true;
        }
        if (segments_left == 0) return false;
        enter_segment();
        return true;
    }

    MCP_DEVICE i32 first() const { return k0 + tile * kStep; }
    MCP_DEVICE MaskBounds bounds() const { return {first(), k0, k1, lo, hi, q0, q1}; }
    // How many tiles from this one on need no mask, going upwards: 0 where this one does.
    MCP_DEVICE i32 num_full() const { return tile >= full_begin ? full_end - tile : 0; }
};

template <int kBlockN>
using KeyTiles = SegmentTiles<kBlockN, Direction::kDownwards>;
template <int kBlockM>
using QueryTiles = SegmentTiles<kBlockM, Direction::kUpwards>;

}  // namespace mcp::attn
