// Five words that one warp sends to others through shared memory, one message at a time.
#pragma once

#include <mcp/ring.cuh>

namespace mcp {

struct Message {
    i32x4 a;
    i32 b;
};

// The sending warp; `leader` is true in one lane. All its lanes call.
MCP_DEVICE void send(u32 mailbox, Ring<1> ring, RingPosition<1>& at, bool leader, Message message) {
    ring.wait_empty(at);
    ptx::sync_warp();
    if (leader) {
        ptx::store_shared_i32x4(mailbox, message.a);
        ptx::store_shared_u32(mailbox + 16, static_cast<u32>(message.b));
        ptx::mbarrier_arrive(ring.full(at));
    }
    at.advance();
}

// A receiving warp, all its lanes; the result is uniform. Every warp reads, so every warp releases.
MCP_DEVICE Message receive(u32 mailbox, Ring<1> ring, RingPosition<1>& at) {
    ring.wait_full(at);
    const i32x4 a = ptx::load_shared_i32x4(mailbox);
    const i32 b = static_cast<i32>(ptx::load_shared_u32(mailbox + 16));
    const Message message = {{uniform(a.x), uniform(a.y), uniform(a.z), uniform(a.w)}, uniform(b)};
    ptx::sync_warp();  // all lanes have read
    if (lane_index() == 0) ring.release(at);
    at.advance();
    return message;
}

}  // namespace mcp
