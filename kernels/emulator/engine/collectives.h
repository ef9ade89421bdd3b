// Instructions that the lanes of a warp execute together, and barriers of warps.
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

// PTX ISA, shfl.sync: modes idx and bfly with membermask 0xffffffff.
std::uint32_t shuffle(std::uint32_t value, int source_lane);
std::uint32_t shuffle_xor(std::uint32_t value, int lane_mask);
// PTX ISA, vote.sync: the lanes' predicates as a mask.
std::uint32_t ballot(bool predicate);
// PTX ISA, elect.sync: one leader, the same for the same membermask; which one is not promised.
bool elect_one();
// PTX ISA, bar.warp.sync: orders memory accesses among the lanes.
void sync_warp();

// PTX ISA, bar: all threads of a warp execute it; the thread count is a multiple of the warp size.
void bar_sync(int id, int num_threads);
void bar_arrive(int id, int num_threads);
void sync_threads();

// PTX ISA, setmaxnreg: registers move between the warp and the CTA's pool; inc waits for them.
void set_max_registers(int registers, bool increase);

// PTX ISA, stmatrix.sync.aligned.m8n8.x4.shared.b16.
void stmatrix_x4(std::uint32_t row_address, const std::uint32_t (&values)[4], bool transpose);

}  // namespace mcp::emulator
