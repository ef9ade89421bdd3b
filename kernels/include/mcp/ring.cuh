// Buffers handed from one writer to its readers and back: a ring of stages, each with a `full` and
// an `empty` mbarrier.
#pragma once

#include <mcp/platform.cuh>

namespace mcp {

// Returns once the phase of this parity has completed.
MCP_DEVICE void wait(u32 barrier, u32 parity) {
    while (!ptx::mbarrier_try_wait(barrier, parity)) {
    }
}

// Where a role stands in a ring; every role walks the same sequence of positions.
template <int kStages>
struct RingPosition {
    i32 stage = 0;
    u32 parity = 0;  // of the number of rounds completed

    MCP_DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <int kStages>
struct Ring {
    static constexpr int kBytes = 2 * kStages * 8;
    using Position = RingPosition<kStages>;

    u32 barriers;  // full[kStages], empty[kStages]

    MCP_DEVICE u32 full(Position at) const { return barriers + 8 * at.stage; }
    MCP_DEVICE u32 empty(Position at) const { return barriers + 8 * (kStages + at.stage); }

    // `num_readers` arrivals make a stage empty again; `num_writers` (and the bytes they announce)
    // fill it.
    MCP_DEVICE void init(u32 num_readers, u32 num_writers = 1) const {
        MCP_UNROLL
        for (int stage = 0; stage < kStages; stage++) {
            ptx::mbarrier_init(barriers + 8 * stage, num_writers);
            ptx::mbarrier_init(barriers + 8 * (kStages + stage), num_readers);
        }
    }

    // Writer: the stage's readers are done with it; in the first round there are none.
    MCP_DEVICE void wait_empty(Position at) const { wait(empty(at), at.parity ^ 1); }
    // Reader: the stage holds what the writer put there in this round.
    MCP_DEVICE void wait_full(Position at) const { wait(full(at), at.parity); }
    MCP_DEVICE void release(Position at) const { ptx::mbarrier_arrive(empty(at)); }
};

// Gives rings their barriers, one ring behind another from `at`; returns the end, where there is
// room for the last of kBarriers.
template <int kBarriers, class... Rings>
MCP_DEVICE u32 place_rings(u32 at, Rings&... rings) {
    static_assert((Rings::kBytes + ...) == 8 * (kBarriers - 1), "traits.h and ring.cuh disagree");
    ((rings.barriers = at, at += Rings::kBytes), ...);
    return at;
}

}  // namespace mcp
