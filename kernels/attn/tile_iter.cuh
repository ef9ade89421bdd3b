// Which work a CTA takes next, and the key tiles of one work item in the order in which all roles visit them.
#pragma once

#include <mcp/platform.cuh>

#include "params.h"

namespace mcp::attn {

// One query tile of one head.
struct WorkItem {
    i32 row0, rows, seg0, num_segs;
    i32 head;  // -1: no work is left
};

// Work items are numbered head section by head section, so that the keys and values in use fit the second-level cache; in
// a section tile by tile, longest first, so that the last CTA to finish does so early; heads innermost.
MCP_DEVICE WorkItem work_item(const FwdParams& params, i32 index) {
    if (index >= params.num_tiles * params.num_heads) return {0, 0, 0, 0, -1};
    const i32 section = index / (params.num_tiles * params.heads_per_section);
    const i32 first_head = section * params.heads_per_section;
    const i32 num_heads = ptx::min(params.heads_per_section, params.num_heads - first_head);
    const i32 in_section = index - first_head * params.num_tiles;
    const i32 rank = in_section / num_heads;
    const i32 tile = ptx::load_constant_i32(params.order + rank);
    const i32x4 t = ptx::load_constant_i32x4(params.tiles + tile);
    return {t.x, t.y, t.z, t.w, first_head + in_section - rank * num_heads};
}

// Walks the key tiles of a work item with at least one segment; last tile of a segment first, as that is where a causal
// mask ends. Every warp of every role sees the same sequence.
template <int kBlockN>
struct KeyTiles {
    const Segment* next_segment;
    i32 segments_left;  // after this one
    i32 tile;           // index in the segment
    i32 k0, k1, lo, hi, q0, q1, full_begin, full_end;

    MCP_DEVICE KeyTiles(const Segment* segments, const WorkItem& work)
        : next_segment(segments + work.seg0), segments_left(work.num_segs) {
        enter_segment();
    }

    MCP_DEVICE void enter_segment() {
        const i32x4 a = ptx::load_constant_i32x4(next_segment);
        const i32x4 b = ptx::load_constant_i32x4(reinterpret_cast<const i32x4*>(next_segment) + 1);
        k0 = uniform(a.x), k1 = uniform(a.y), lo = uniform(a.z), hi = uniform(a.w);
        q0 = uniform(b.x), q1 = uniform(b.y), full_begin = uniform(b.z), full_end = uniform(b.w);
        tile = (k1 - k0 - 1) / kBlockN;
        next_segment++;
        segments_left--;
    }

    // Moves to the next key tile; false if this was the last.
    MCP_DEVICE bool advance() {
        if (--tile >= 0) return true;
        if (segments_left == 0) return false;
        enter_segment();
        return true;
    }

    MCP_DEVICE i32 first_key() const { return k0 + tile * kBlockN; }
    // Every row of the query tile sees every key of this tile.
    MCP_DEVICE bool is_full() const { return tile >= full_begin && tile < full_end; }
};

}  // namespace mcp::attn
