// Compile-time choices of one variant of a kernel, and what follows from them. Plain C++: the host
// reads them too.
#pragma once

#include <mcp/types.h>

namespace mcp::attn {

constexpr int kMaxSharedBytes = 227 * 1024;  // what one CTA may ask for on sm_90

// A producer warpgroup and `kConsumers` consumer warpgroups of 64 query rows each, one CTA per
// multiprocessor.
template <class T_,
          int kHeadDim_,
          int kValueDim_,
          int kBlockN_,
          int kStages_,
          int kConsumers_,
          bool kSoftcap_,
          bool kDropout_>
struct FwdTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kValueDim = kValueDim_;
    static constexpr int kBlockM = 64 * kConsumers_;
    static constexpr int kBlockN = kBlockN_;
    static constexpr int kStages = kStages_;
    static constexpr int kConsumers = kConsumers_;
    static constexpr bool kSoftcap = kSoftcap_;
    static constexpr bool kDropout = kDropout_;
    static constexpr int kThreads = 128 * (kConsumers + 1);

    // Register pool per lane: 3 x 168 = 24 + 2 x 240, or 4 x 128 = 32 + 3 x 160.
    static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

    static constexpr int kPaddedHeadDim = (kHeadDim + 63) / 64 * 64;
    static constexpr int kPaddedValueDim = (kValueDim + 63) / 64 * 64;
    static constexpr int kQueryBytes = kBlockM * kPaddedHeadDim * 2;
    static constexpr int kKeyBytes = kBlockN * kPaddedHeadDim * 2;
    static constexpr int kValueBytes = kBlockN * kPaddedValueDim * 2;

    // Shared memory: [align to 1024] q | k stages | v stages | out rooms | mailbox | barriers.
    // Where there is no room for results on their way out, they take the place of the queries, and
    // the next queries are loaded later.
    static constexpr int kMailSlots = 4;
    static constexpr int kMailBytes = kMailSlots * 48;
    static constexpr int kNumBarriers = 2 * (1 + 2 * kStages + kMailSlots) + 1;
    static constexpr int kRoomBytes = 16 * 128;  // of a consumer warp: its rows, 128 bytes each
    static constexpr int kQueryAt = 0;
    static constexpr int kKeysAt = kQueryAt + kQueryBytes;
    static constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
    static constexpr int kRoomsAt = kValuesAt + kStages * kValueBytes;
    static constexpr int kRoomsBytes = kConsumers * 4 * kRoomBytes;
    static constexpr bool kOutInQueries =
        1024 + kRoomsAt + kRoomsBytes + kMailBytes + 8 * kNumBarriers > kMaxSharedBytes;
    static constexpr int kOutAt = kOutInQueries ? kQueryAt : kRoomsAt;
    static constexpr int kMailboxAt = kRoomsAt + (kOutInQueries ? 0 : kRoomsBytes);
    static constexpr int kBarriersAt = kMailboxAt + kMailBytes;
    static constexpr int kSharedBytes = (1024 + kBarriersAt + 8 * kNumBarriers + 127) / 128 * 128;

    static_assert(kConsumers == 2 || kConsumers == 3, "register pools are computed for 2 and 3");
    static_assert(kHeadDim % 16 == 0 && kValueDim % 16 == 0 && kBlockN % 16 == 0,
                  "wgmma reduces 16 at a time");
    static_assert(kSharedBytes <= kMaxSharedBytes, "more shared memory than a CTA can have");
};

// Key tiles of kBlockN keys, 64 per consumer; query tiles of kBlockM pass by. Head dims up to 128.
// kAddsDq: dq is added up from here; without it the kernel makes dk and dv alone.
template <class T_,
          int kHeadDim_,
          int kValueDim_,
          int kBlockM_,
          int kStages_,
          bool kSoftcap_,
          bool kDropout_,
          bool kAddsDq_>
struct BwdTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kValueDim = kValueDim_;
    static constexpr int kConsumers = 2;
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kBlockN = 64 * kConsumers;
    static constexpr int kStages = kStages_;
    static constexpr int kDoutStages = kStages;
    static constexpr bool kSoftcap = kSoftcap_;
    static constexpr bool kDropout = kDropout_;
    static constexpr bool kAddsDq = kAddsDq_;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = 240;

    static constexpr int kPaddedHeadDim = (kHeadDim + 63) / 64 * 64;
    static constexpr int kPaddedValueDim = (kValueDim + 63) / 64 * 64;
    static_assert(!kAddsDq || (kBlockM == 64 && kPaddedHeadDim == 128),
                  "each consumer computes 64 x 64 of dq: all rows of one 64-column panel");

    static constexpr int kKeyBytes = kBlockN * kPaddedHeadDim * 2;
    static constexpr int kValueBytes = kBlockN * kPaddedValueDim * 2;
    static constexpr int kQueryBytes = kBlockM * kPaddedHeadDim * 2;
    static constexpr int kDoutBytes = kBlockM * kPaddedValueDim * 2;
    static constexpr int kDsBytes = kBlockM * kBlockN * 2;
    static constexpr int kDqBytes = kBlockM * kPaddedHeadDim * 4;
    static constexpr int kDqColumns = kHeadDim;
    static constexpr int kDqStages = 1;
    static constexpr int kRowStatBytes = kBlockM * 4;

    // Shared memory: [align to 1024] k | v | q stages | dout stages | [ds x 2 | dq] | lse | delta |
    // mailbox | barriers.
    static constexpr int kKeysAt = 0;
    static constexpr int kValuesAt = kKeysAt + kKeyBytes;
    static constexpr int kQueriesAt = kValuesAt + kValueBytes;
    static constexpr int kDoutAt = kQueriesAt + kStages * kQueryBytes;
    static constexpr int kDsAt = kDoutAt + kStages * kDoutBytes;
    static constexpr int kDqAt = kDsAt + (kAddsDq ? 2 * kDsBytes : 0);
    static constexpr int kLseAt = kDqAt + (kAddsDq ? kDqBytes : 0);
    static constexpr int kDeltaAt = kLseAt + kStages * kRowStatBytes;
    static constexpr int kMailboxAt = kDeltaAt + kStages * kRowStatBytes;
    static constexpr int kBarriersAt = kMailboxAt + 32;
    static constexpr int kNumBarriers = 2 * (1 + 1 + 1 + 2 * kStages) + 1;
    static constexpr int kSharedBytes = (1024 + kBarriersAt + 8 * kNumBarriers + 127) / 128 * 128;
    static_assert(kSharedBytes <= kMaxSharedBytes, "more shared memory than a CTA can have");
};

// dk and dv for head dims above 128, multiples of 64: tiles of 64 keys and 64 queries. One consumer
// makes the probabilities and dv, the other the gradients of the scores and dk.
template <class T_, int kHeadDim_, int kValueDim_, int kStages_, bool kSoftcap_>
struct BwdWideTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kValueDim = kValueDim_;
    static constexpr int kConsumers = 2;
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 64;
    static constexpr int kStages = kStages_;
    static constexpr int kDoutStages = kStages;
    static constexpr bool kSoftcap = kSoftcap_;
    static constexpr bool kAddsDq = false;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = 240;

    static_assert(kHeadDim % 64 == 0 && kValueDim % 64 == 0, "panels are not padded");
    static constexpr int kKeyBytes = kBlockN * kHeadDim * 2;
    static constexpr int kValueBytes = kBlockN * kValueDim * 2;
    static constexpr int kQueryBytes = kBlockM * kHeadDim * 2;
    static constexpr int kDoutBytes = kBlockM * kValueDim * 2;
    static constexpr int kWeightBytes = kBlockM * kBlockN * 2;
    static constexpr int kRowStatBytes = kBlockM * 4;

    // Shared memory: [align to 1024] k | v | q stages | dout stages | weights stages | lse | delta
    // | mailbox | barriers.
    static constexpr int kKeysAt = 0;
    static constexpr int kValuesAt = kKeysAt + kKeyBytes;
    static constexpr int kQueriesAt = kValuesAt + kValueBytes;
    static constexpr int kDoutAt = kQueriesAt + kStages * kQueryBytes;
    static constexpr int kWeightsAt = kDoutAt + kStages * kDoutBytes;
    static constexpr int kLseAt = kWeightsAt + kStages * kWeightBytes;
    static constexpr int kDeltaAt = kLseAt + kStages * kRowStatBytes;
    static constexpr int kMailboxAt = kDeltaAt + kStages * kRowStatBytes;
    static constexpr int kBarriersAt = kMailboxAt + 32;
    static constexpr int kNumBarriers = 2 * (1 + 1 + 3 * kStages) + 1;
    static constexpr int kSharedBytes = (1024 + kBarriersAt + 8 * kNumBarriers + 127) / 128 * 128;
    static_assert(kSharedBytes <= kMaxSharedBytes, "more shared memory than a CTA can have");
};

// All three gradients for head dims 64, 192 and 256, where consumers have different work: tiles of
// 64 queries. kStages: of q; kDsStages: of the gradients of the scores.
template <class T_,
          int kHeadDim_,
          int kValueDim_,
          int kBlockN_,
          int kStages_,
          int kDoutStages_,
          int kDsStages_,
          int kDqStages_,
          int kScoreConsumers_>
struct BwdRolesTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kValueDim = kValueDim_;
    static constexpr int kScoreConsumers = kScoreConsumers_;  // these make the probabilities
    static constexpr int kConsumers = kScoreConsumers + 1;
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = kBlockN_;
    static constexpr int kStages = kStages_;
    static constexpr int kDoutStages = kDoutStages_;
    static constexpr int kDsStages = kDsStages_;
    static constexpr bool kAddsDq = true;
    static constexpr int kThreads = 128 * (kConsumers + 1);

    // Register pool per lane: 3 x 168 = 24 + 2 x 240, or 4 x 128 > 24 + 2 x 120 + 240.
    static constexpr int kProducerRegisters = 24;
    static constexpr int kScoreRegisters = kConsumers == 2 ? 240 : 120;
    static constexpr int kConsumerRegisters = 240;
    static_assert(kConsumers == 2 || kConsumers == 3, "register pools are computed for 2 and 3");

    static_assert(kHeadDim % 64 == 0 && kValueDim % 64 == 0, "panels are not padded");
    static constexpr int kKeyBytes = kBlockN * kHeadDim * 2;
    static constexpr int kValueBytes = kBlockN * kValueDim * 2;
    static constexpr int kQueryBytes = kBlockM * kHeadDim * 2;
    static constexpr int kDoutBytes = kBlockM * kValueDim * 2;
    static constexpr int kScoreBytes = kBlockM * kBlockN * 2;  // of probabilities, or of ds
    static constexpr int kDqColumns = 64;
    static constexpr int kDqStages = kDqStages_;
    static constexpr int kDqBytes = kBlockM * kDqColumns * 4;
    static constexpr int kRowStatBytes = kBlockM * 4;

    // Shared memory: [align to 1024] k | v | q stages | dout stages | probabilities | ds stages |
    // dq rooms | lse | delta | mailbox | barriers.
    static constexpr int kKeysAt = 0;
    static constexpr int kValuesAt = kKeysAt + kKeyBytes;
    static constexpr int kQueriesAt = kValuesAt + kValueBytes;
    static constexpr int kDoutAt = kQueriesAt + kStages * kQueryBytes;
    static constexpr int kProbsAt = kDoutAt + kDoutStages * kDoutBytes;
    static constexpr int kDsAt = kProbsAt + kScoreBytes;
    static constexpr int kDqAt = kDsAt + kDsStages * kScoreBytes;
    static constexpr int kLseAt = kDqAt + kDqStages * kDqBytes;
    static constexpr int kDeltaAt = kLseAt + kStages * kRowStatBytes;
    static constexpr int kMailboxAt = kDeltaAt + kDoutStages * kRowStatBytes;
    static constexpr int kBarriersAt = kMailboxAt + 32;
    static constexpr int kNumBarriers =
        2 * (1 + 1 + 1 + kStages + kDoutStages + kDsStages + kDqStages) + 1;
    static constexpr int kSharedBytes = (1024 + kBarriersAt + 8 * kNumBarriers + 127) / 128 * 128;
    static_assert(kSharedBytes <= kMaxSharedBytes, "more shared memory than a CTA can have");
};

// Head dims 192 and 256: one consumer makes the probabilities and dv, the other ds, dk and dq.
// There is room for one stage of some things alone: of dq and dout at 256, of ds where values are
// as wide as keys.
template <class T, int kHeadDim, int kValueDim, int kStages>
using Bwd192Traits = BwdRolesTraits<T,
                                    kHeadDim,
                                    kValueDim,
                                    kHeadDim == 192 ? 96 : 80,
                                    kStages,
                                    kHeadDim == 192 ? kStages : 1,
                                    kValueDim <= 128 ? 2 : 1,
                                    kHeadDim == 192 ? 2 : 1,
                                    1>;

// Head dim 64: two consumers make the probabilities and ds, a third one all gradients.
template <class T, int kStages>
using Bwd64Traits = BwdRolesTraits<T, 64, 64, 160, kStages, kStages, 1, 2, 2>;

// dq alone: tiles of 128 queries, 64 per consumer, past which tiles of kBlockN keys go.
template <class T_,
          int kHeadDim_,
          int kValueDim_,
          int kBlockN_,
          int kKeyStages_,
          int kValueStages_,
          bool kSoftcap_,
          bool kDropout_>
struct DqTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kValueDim = kValueDim_;
    static constexpr int kConsumers = 2;
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kBlockN = kBlockN_;
    static constexpr int kKeyStages = kKeyStages_;
    static constexpr int kValueStages = kValueStages_;
    static constexpr bool kSoftcap = kSoftcap_;
    static constexpr bool kDropout = kDropout_;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = 240;

    static constexpr int kPaddedHeadDim = (kHeadDim + 63) / 64 * 64;
    static constexpr int kPaddedValueDim = (kValueDim + 63) / 64 * 64;
    static constexpr int kQueryBytes = kBlockM * kPaddedHeadDim * 2;
    static constexpr int kDoutBytes = kBlockM * kPaddedValueDim * 2;
    static constexpr int kKeyBytes = kBlockN * kPaddedHeadDim * 2;
    static constexpr int kValueBytes = kBlockN * kPaddedValueDim * 2;

    // Shared memory: [align to 1024] q | dout | k stages | v stages | mailbox | barriers.
    static constexpr int kMailSlots = 4;
    static constexpr int kMailBytes = kMailSlots * 48;
    static constexpr int kNumBarriers = 2 * (1 + kKeyStages + kValueStages + kMailSlots) + 1;
    static constexpr int kQueryAt = 0;
    static constexpr int kDoutAt = kQueryAt + kQueryBytes;
    static constexpr int kKeysAt = kDoutAt + kDoutBytes;
    static constexpr int kValuesAt = kKeysAt + kKeyStages * kKeyBytes;
    static constexpr int kMailboxAt = kValuesAt + kValueStages * kValueBytes;
    static constexpr int kBarriersAt = kMailboxAt + kMailBytes;
    static constexpr int kSharedBytes = (1024 + kBarriersAt + 8 * kNumBarriers + 127) / 128 * 128;
    static_assert(kHeadDim % 16 == 0 && kValueDim % 16 == 0 && kBlockN % 16 == 0,
                  "wgmma reduces 16 at a time");
    static_assert(kSharedBytes <= kMaxSharedBytes, "more shared memory than a CTA can have");
};

}  // namespace mcp::attn
