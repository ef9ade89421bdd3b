// Shared memory of the backward kernel, and the messages of its loader to the other roles.
#pragma once

#include <mcp/panels.cuh>
#include <mcp/ring.cuh>

#include "tile_iter.cuh"
#include "traits.h"

namespace mcp::attn {

// The rooms of shared memory that both backward kernels have.
template <class Traits>
struct BwdRooms {
    using Keys = Panels<Traits::kBlockN, Traits::kHeadDim>;
    using Values = Panels<Traits::kBlockN, Traits::kValueDim>;
    using Queries = Panels<Traits::kBlockM, Traits::kHeadDim>;
    using Dout = Panels<Traits::kBlockM, Traits::kValueDim>;
    static_assert(Keys::kBytes == Traits::kKeyBytes && Values::kBytes == Traits::kValueBytes &&
                      Queries::kBytes == Traits::kQueryBytes && Dout::kBytes == Traits::kDoutBytes,
                  "traits.h and panels.cuh disagree");
    static constexpr int kConsumerWarps = Traits::kConsumers * kWarpsPerWarpgroup;
    static constexpr int kConsumerThreads = Traits::kConsumers * kWarpgroupSize;

    u32 base;

    MCP_DEVICE BwdRooms()
        : base((ptx::dynamic_shared() + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes) {}

    MCP_DEVICE Keys keys() const { return {base + Traits::kKeysAt}; }
    MCP_DEVICE Values values() const { return {base + Traits::kValuesAt}; }
    MCP_DEVICE Queries queries(int stage) const {
        return {base + Traits::kQueriesAt + stage * Traits::kQueryBytes};
    }
    MCP_DEVICE Dout dout(int stage) const {
        return {base + Traits::kDoutAt + stage * Traits::kDoutBytes};
    }
    MCP_DEVICE u32 lse(int stage) const {
        return base + Traits::kLseAt + stage * Traits::kRowStatBytes;
    }
    MCP_DEVICE u32 delta(int stage) const {
        return base + Traits::kDeltaAt + stage * Traits::kRowStatBytes;
    }
    MCP_DEVICE u32 mailbox() const { return base + Traits::kMailboxAt; }
};

// Consumer threads read lse, delta and the mailbox themselves, so each warp releases those; wgmma
// reads the tiles.
//   ring     filled by                     emptied by (arrivals)       what a reader may read
//   keys     loader: bytes of k and v, or  1 thread per consumer       the k and v tiles
//            1 arrival after clearing rows
//   queries  loader: bytes of q and lse,   1 lane per consumer warp    the stage's q tile and lse
//            or 1 arrival after clearing
//   dout     loader: the same of dout      1 lane per consumer warp    the stage's dout tile and
//            and delta                                                 delta
//   dq       consumers: every thread       1 thread of the storer      the dq tile
//   mail     loader: 1 arrival             1 lane per warp of          the mailbox
//                                          consumers and storer
// `landed` is the loader's own: a tile of which it must clear rows has arrived.
// Named barrier 1, 256 threads: both consumers have written their half of ds.
template <class Traits>
struct BwdShared : BwdRooms<Traits> {
    using Rooms = BwdRooms<Traits>;
    using Ds = Panels<Traits::kBlockM, Traits::kBlockN>;
    using Stages = Ring<Traits::kStages>;
    using Rooms::base;
    static_assert(Ds::kBytes == Traits::kDsBytes, "traits.h and panels.cuh disagree");

    Ring<1> key_ring, dq_ring, mail_ring;
    Stages query_ring, dout_ring;
    u32 landed;

    MCP_DEVICE BwdShared() {
        landed = place_rings<Traits::kNumBarriers>(base + Traits::kBarriersAt, key_ring, dq_ring,
                                                   mail_ring, query_ring, dout_ring);
    }

    MCP_DEVICE Ds ds(int half) const { return {base + Traits::kDsAt + half * Traits::kDsBytes}; }
    MCP_DEVICE u32 dq(int stage = 0) const {
        return base + Traits::kDqAt + stage * Traits::kDqBytes;
    }

    // One thread; a CTA barrier must follow.
    MCP_DEVICE void init_barriers() const {
        key_ring.init(Traits::kConsumers);
        query_ring.init(Rooms::kConsumerWarps);
        dout_ring.init(Rooms::kConsumerWarps);
        dq_ring.init(1, Rooms::kConsumerThreads);
        mail_ring.init(Rooms::kConsumerWarps + (Traits::kAddsDq ? 1 : 0));
        ptx::mbarrier_init(landed, 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();
    }
};

}  // namespace mcp::attn
