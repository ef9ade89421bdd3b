// The emulated instructions: the name that reports use, and where the PTX ISA defines it.
#pragma once

#include <cstdint>

namespace mcp::emulator {

#define MCP_EMULATED_INSTRUCTIONS(X)                                                               \
    X(kNone, "(nothing yet)", "")                                                                  \
    X(kLoadShared, "ld.shared", "Data Movement and Conversion Instructions: ld")                   \
    X(kStoreShared, "st.shared", "Data Movement and Conversion Instructions: st")                  \
    X(kLoadConstant, "ld.global.nc", "Data Movement and Conversion Instructions: ld.global.nc")    \
    X(kLoadGlobal, "ld.global", "Data Movement and Conversion Instructions: ld")                   \
    X(kStoreGlobal, "st.global", "Data Movement and Conversion Instructions: st")                  \
    X(kAtomicAdd, "atom.add", "Parallel Synchronization and Communication Instructions: atom")     \
    X(kAtomicMax, "atom.max", "Parallel Synchronization and Communication Instructions: atom")     \
    X(kLdmatrix, "ldmatrix", "Warp-level Matrix Load Instruction: ldmatrix")                       \
    X(kStmatrix, "stmatrix", "Warp-level Matrix Store Instruction: stmatrix")                      \
    X(kShuffle, "shfl.sync", "Data Movement and Conversion Instructions: shfl.sync")               \
    X(kVote, "vote.sync", "Parallel Synchronization and Communication Instructions: vote.sync")    \
    X(kSyncWarp, "bar.warp.sync",                                                                  \
      "Parallel Synchronization and Communication Instructions: bar.warp.sync")                    \
    X(kBarSync, "bar.sync", "Parallel Synchronization and Communication Instructions: bar")        \
    X(kBarArrive, "bar.arrive", "Parallel Synchronization and Communication Instructions: bar")    \
    X(kMBarrierInit, "mbarrier.init",                                                              \
      "Parallel Synchronization and Communication Instructions: mbarrier.init")                    \
    X(kMBarrierArrive, "mbarrier.arrive",                                                          \
      "Parallel Synchronization and Communication Instructions: mbarrier.arrive")                  \
    X(kMBarrierExpectTx, "mbarrier.arrive.expect_tx",                                              \
      "Parallel Synchronization and Communication Instructions: mbarrier.arrive")                  \
    X(kMBarrierTryWait, "mbarrier.try_wait.parity",                                                \
      "Parallel Synchronization and Communication Instructions: mbarrier.try_wait")                \
    X(kFenceProxyAsync, "fence.proxy.async",                                                       \
      "Parallel Synchronization and Communication Instructions: membar, fence")                    \
    X(kFenceMBarrierInit, "fence.mbarrier_init",                                                   \
      "Parallel Synchronization and Communication Instructions: membar, fence")                    \
    X(kTmaLoad, "cp.async.bulk.tensor (load)",                                                     \
      "Data Movement and Conversion Instructions: cp.async.bulk.tensor")                           \
    X(kTmaStore, "cp.async.bulk.tensor (store)",                                                   \
      "Data Movement and Conversion Instructions: cp.async.bulk.tensor")                           \
    X(kTmaReduce, "cp.reduce.async.bulk.tensor",                                                   \
      "Data Movement and Conversion Instructions: cp.reduce.async.bulk.tensor")                    \
    X(kTmaPrefetch, "prefetch.tensormap",                                                          \
      "Data Movement and Conversion Instructions: prefetch, prefetchu")                            \
    X(kBulkCommit, "cp.async.bulk.commit_group",                                                   \
      "Data Movement and Conversion Instructions: cp.async.bulk.commit_group")                     \
    X(kBulkWait, "cp.async.bulk.wait_group",                                                       \
      "Data Movement and Conversion Instructions: cp.async.bulk.wait_group")                       \
    X(kWgmmaFence, "wgmma.fence", "Asynchronous wgmma Proxy Operations: wgmma.fence")              \
    X(kWgmma, "wgmma.mma_async", "Asynchronous Multiply-and-Accumulate Instructions")              \
    X(kWgmmaCommit, "wgmma.commit_group",                                                          \
      "Asynchronous wgmma Proxy Operations: wgmma.commit_group")                                   \
    X(kWgmmaWait, "wgmma.wait_group", "Asynchronous wgmma Proxy Operations: wgmma.wait_group")     \
    X(kSetMaxRegisters, "setmaxnreg", "Miscellaneous Instructions: setmaxnreg")                    \
    X(kArithmetic, "arithmetic or store", "Floating Point Instructions: ex2, lg2, rcp; cvt")       \
    X(kExit, "exit", "Control Flow Instructions: exit")

enum class Instruction : std::uint8_t {
#define MCP_ENUMERATOR(id, name, section) id,
    MCP_EMULATED_INSTRUCTIONS(MCP_ENUMERATOR)
#undef MCP_ENUMERATOR
        kCount
};

constexpr int kNumInstructions = static_cast<int>(Instruction::kCount);

inline const char* name_of(Instruction instruction) {
    static const char* const kNames[] = {
#define MCP_NAME(id, name, section) name,
        MCP_EMULATED_INSTRUCTIONS(MCP_NAME)
#undef MCP_NAME
    };
    return kNames[static_cast<int>(instruction)];
}

// Chapter of the PTX ISA document that defines the instruction.
inline const char* section_of(Instruction instruction) {
    static const char* const kSections[] = {
#define MCP_SECTION(id, name, section) section,
        MCP_EMULATED_INSTRUCTIONS(MCP_SECTION)
#undef MCP_SECTION
    };
    return kSections[static_cast<int>(instruction)];
}

}  // namespace mcp::emulator
