// What a producer that loads key tiles tells the consumers: one message per segment of a work
// item, so that no consumer waits for global memory, and what a tile without a mask does not need
// takes no registers.
#pragma once

#include <mcp/mailbox.cuh>

#include "tile_iter.cuh"

namespace mcp::attn {

// {row0, rows, head, segments left, this one included} {k0, k1, lo, hi} {q0, q1, full_begin,
// full_end}
using SegmentMail = Message<3>;

MCP_DEVICE SegmentMail to_mail(const WorkItem& work) {
    return {{{work.row0, work.rows, work.head, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}}};
}
template <int kBlockN>
MCP_DEVICE SegmentMail to_mail(const WorkItem& work, const KeyTiles<kBlockN>& keys) {
    return {{{work.row0, work.rows, work.head, keys.segments_left + 1},
             {keys.k0, keys.k1, keys.lo, keys.hi},
             {keys.q0, keys.q1, keys.full_begin, keys.full_end}}};
}

// Where a consumer stands in the work that is mailed to it: the same sequence of tiles as KeyTiles.
// All lanes of a warp call together.
template <int kBlockN, int kMailSlots>
struct MailedKeys {
    u32 mailbox;
    Ring<kMailSlots> ring;
    RingPosition<kMailSlots> at;
    i32 tile, full_begin, full_end, segments_left;

    MCP_DEVICE MailedKeys(u32 mailbox, Ring<kMailSlots> ring) : mailbox(mailbox), ring(ring) {}

    MCP_DEVICE u32 slot() const { return mailbox + at.stage * SegmentMail::kBytes; }
    MCP_DEVICE i32x4 load(int part) const { return ptx::load_shared_i32x4(slot() + 16 * part); }

    // The next work item, with its first segment if it has one: row0, rows, head, uniform.
    MCP_DEVICE WorkItem open() {
        ring.wait_full(at);
        const i32x4 mail = load(0);
        const WorkItem work = {uniform(mail.x), uniform(mail.y), 0, uniform(mail.w),
                               uniform(mail.z)};
        segments_left = work.num_segs;
        enter_segment();
        return work;
    }
    MCP_DEVICE void enter_segment() {
        const i32x4 keys = load(1), rows = load(2);
        tile = uniform((keys.y - keys.x - 1) / kBlockN);
        full_begin = uniform(rows.z), full_end = uniform(rows.w);
        segments_left--;
    }
    // Gives back the message: nothing of the segment, or of the work item, is read any more.
    MCP_DEVICE void close() { give_back(ring, at); }

    // Moves on by `num_tiles` tiles of this segment; false if no tile is left.
    MCP_DEVICE bool advance(i32 num_tiles) {
        tile -= num_tiles;
        if (tile >= 0) return true;
        if (segments_left == 0) return false;
        close();
        ring.wait_full(at);
        enter_segment();
        return true;
    }

    // How many tiles from this one on need no mask for any row.
    MCP_DEVICE i32 num_full() const { return tile < full_end ? tile - full_begin + 1 : 0; }
    MCP_DEVICE i32 first() const { return uniform(load(1).x) + tile * kBlockN; }
    MCP_DEVICE MaskBounds bounds() const {
        const i32x4 keys = load(1), rows = load(2);
        return {keys.x + tile * kBlockN, keys.x, keys.y, keys.z, keys.w, rows.x, rows.y};
    }
};

}  // namespace mcp::attn
