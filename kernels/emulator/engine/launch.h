// Running a kernel: every CTA on one host thread, its threads on stacks of their own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "global_memory.h"
#include "instructions.h"

namespace mcp::emulator {

// PTX ISA, State Spaces: a CTA of sm_90 has at most 227 KB of shared memory and 64 K registers.
constexpr std::uint32_t kMaxSharedBytes = 227 * 1024;
constexpr int kRegistersPerMultiprocessor = 64 * 1024;

struct LaunchConfig {
    int num_blocks = 1;
    int num_threads = 128;
    std::uint32_t shared_bytes = 0;
    // What the compiler allocated per thread at launch; 0: all that `num_threads` leave, in steps
    // of 8.
    int registers_per_thread = 0;
    std::uint64_t seed = 0;
    int host_threads = 1;
    bool record_history = false;
    // Empty: addresses are not checked.
    std::vector<GlobalRange> global_ranges;
};

struct LaunchReport {
    std::string error;    // empty: all is well
    std::string history;  // one line per event of an mbarrier, when recorded
    std::uint64_t counts[kNumInstructions] = {};
};

// Runs `kernel` in every thread of the grid and reports the first error of any CTA.
LaunchReport launch(const LaunchConfig& config, const std::function<void()>& kernel);

}  // namespace mcp::emulator
