// mbarrier objects. PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier.
#pragma once

#include <cstdint>

#include "clock.h"

namespace mcp::emulator {

struct MBarrier {
    std::uint32_t address = 0;
    std::uint32_t expected = 0;  // arrivals per phase
    std::uint32_t pending = 0;   // arrivals missing in this phase
    std::int64_t transactions =
        0;  // bytes missing in this phase; negative: came before they were expected
    std::int64_t phase = 0;  // phases completed
    std::uint32_t copies_in_flight = 0;
    Epoch init;                // the initialising thread's clock
    bool init_fenced = false;  // that thread has made the object visible to the async proxy,
    Epoch init_fence;          // at this time
    VectorClock arrivals;      // of the phase in progress
    VectorClock completed;     // what a successful wait learns
};

void mbarrier_init(std::uint32_t address, std::uint32_t count);
void mbarrier_arrive(std::uint32_t address, std::uint32_t expected_bytes, bool with_bytes);
bool mbarrier_try_wait(std::uint32_t address, std::uint32_t parity);

// A copy that will complete `bytes` on the barrier has been issued: the event that waiters will
// know. The asynchronous unit must be able to see the initialised object.
Epoch mbarrier_copy_issued(std::uint32_t address);
void mbarrier_copy_completed(std::uint32_t address, std::uint32_t bytes, Epoch promised);

}  // namespace mcp::emulator
