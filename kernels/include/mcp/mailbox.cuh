// Messages that one warp sends to others through shared memory: a ring of slots.
#pragma once

#include <mcp/ring.cuh>

namespace mcp {

template <int kVectors>
struct Message {
    static constexpr int kBytes = 16 * kVectors;
    i32x4 part[kVectors];
};

// The sending warp; `leader` is true in one lane. All its lanes call.
template <int kVectors, int kSlots>
MCP_DEVICE void send(u32 mailbox,
                     Ring<kSlots> ring,
                     RingPosition<kSlots>& at,
                     bool leader,
                     const Message<kVectors>& message) {
    ring.wait_empty(at);
    ptx::sync_warp();
    if (leader) {
        MCP_UNROLL
        for (int i = 0; i < kVectors; i++) {
            ptx::store_shared_i32x4(mailbox + at.stage * message.kBytes + 16 * i, message.part[i]);
        }
        ptx::mbarrier_arrive(ring.full(at));
    }
    at.advance();
}

// A receiving warp gives the slot back: all its lanes call, and have read. Every warp reads, so
// every warp releases.
template <int kSlots>
MCP_DEVICE void give_back(Ring<kSlots> ring, RingPosition<kSlots>& at) {
    ptx::sync_warp();
    if (lane_index() == 0) ring.release(at);
    at.advance();
}

// A receiving warp, all its lanes: the whole message at once.
template <int kVectors, int kSlots>
MCP_DEVICE Message<kVectors> receive(u32 mailbox, Ring<kSlots> ring, RingPosition<kSlots>& at) {
    Message<kVectors> message;
    ring.wait_full(at);
    MCP_UNROLL
    for (int i = 0; i < kVectors; i++) {
        message.part[i] = ptx::load_shared_i32x4(mailbox + at.stage * message.kBytes + 16 * i);
    }
    give_back(ring, at);
    return message;
}

}  // namespace mcp
