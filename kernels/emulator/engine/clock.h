// Vector clocks: what each thread knows to have happened.
//
// A race is found from the order that synchronisation promises, not from the order in which this
// run happened to execute: two accesses conflict unless one is known to the other's thread. A clock
// has a component per thread, and one for each kind of work that completes asynchronously:
//   - a warpgroup's wgmma instructions, numbered in issue order and known to be done after
//   wait_group;
//   - an mbarrier's phases: a TMA load is done when the phase that counts its bytes has completed;
//   - the bulk stores of a thread, numbered by group and known to have read after wait_group.read.
#pragma once

#include <cstdint>

namespace mcp::emulator {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarpgroups = kMaxThreads / 128;
constexpr int kMaxMBarriers = 84;
constexpr int kMaxBulkIssuers = 40;

constexpr int kFirstWarpgroup = kMaxThreads;
constexpr int kFirstMBarrier = kFirstWarpgroup + kMaxWarpgroups;
constexpr int kFirstBulk = kFirstMBarrier + kMaxMBarriers;
constexpr int kNumComponents = kFirstBulk + kMaxBulkIssuers;
constexpr std::uint16_t kNoComponent = 0xffff;

// One event: the `value`-th of a component. Value 0 is before everything.
struct Epoch {
    std::uint16_t component = kNoComponent;
    std::uint32_t value = 0;
    bool operator==(const Epoch& other) const {
        return component == other.component && value == other.value;
    }
};

struct alignas(64) VectorClock {
    std::uint32_t value[kNumComponents] = {};

    bool knows(Epoch event) const {
        return event.value == 0 || value[event.component] >= event.value;
    }
    void learn(Epoch event) {
        raise(event.component, event.value);
    }
    void join(const VectorClock& other) {
        for (int i = 0; i < kNumComponents; ++i) raise(i, other.value[i]);
    }

  private:
    void raise(int component, std::uint32_t to) {
        value[component] = value[component] < to ? to : value[component];
    }
};

}  // namespace mcp::emulator
