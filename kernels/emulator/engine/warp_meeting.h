// How the lanes of a warp execute one instruction together.
#pragma once

#include <cstdint>

#include "cta.h"

namespace mcp::emulator {

// Waits for all 32 lanes at the same instruction with the same operands; the last to come runs
// `action(warp, arguments)`, which may block, and then all go on. No order of memory accesses
// follows.
template <class Action>
void collective(Instruction instruction, std::uint64_t operands, void* argument, Action action) {
    Cta& cta = this_cta();
    cta.begin(instruction);
    Thread& thread = *cta.running;
    Warp& warp = cta.warps[static_cast<std::size_t>(thread.warp())];
    Collective& meeting = warp.collective;
    if (warp.exited_lanes != 0) {
        cta.fail("lanes 0x%08x of the warp have exited; all 32 must execute it", warp.exited_lanes);
    }
    if (meeting.arrived == 0) {
        meeting.instruction = instruction;
        meeting.operands = operands;
    } else if (meeting.instruction != instruction || meeting.operands != operands) {
        cta.fail(
            "divergence: lanes 0x%08x of the warp wait in %s (operands 0x%llx), this lane has "
            "operands 0x%llx",
            meeting.arrived, name_of(meeting.instruction),
            static_cast<unsigned long long>(meeting.operands),
            static_cast<unsigned long long>(operands));
    }
    meeting.arguments[thread.lane()] = argument;
    meeting.arrived |= 1u << thread.lane();
    if (meeting.arrived != kAllLanes) {
        cta.block(Wait::kLanes, 0, 0);
        return;
    }
    action(warp, meeting.arguments);
    meeting.arrived = 0;
    Thread* lanes = &cta.threads[static_cast<std::size_t>(thread.warp()) * kWarpLanes];
    for (int lane = 0; lane < kWarpLanes; ++lane) {
        if (lane != thread.lane()) cta.wake(lanes[lane]);
    }
}

}  // namespace mcp::emulator
