// A thread's place, instructions that the lanes of a warp execute together, and barriers of warps.
#pragma once

#include <cstdint>

namespace mcp::emulator {

// PTX ISA, Special Registers: tid, ctaid, nctaid.
std::uint32_t thread_index();
std::uint32_t block_index();
std::uint32_t num_blocks();

// PTX ISA, shfl.sync: modes idx and bfly with membermask 0xffffffff.
std::uint32_t shuffle(std::uint32_t value, int source_lane);
std::uint32_t shuffle_xor(std::uint32_t value, int lane_mask);
// PTX ISA, vote.sync: the lanes' predicates as a mask.
std::uint32_t ballot(bool predicate);
// PTX ISA, bar.warp.sync: orders memory accesses among the lanes.
void sync_warp();

// PTX ISA, bar: all threads of a warp execute it; the thread count is a multiple of the warp size.
void bar_sync(int id, int num_threads);
void bar_arrive(int id, int num_threads);
void sync_threads();

// PTX ISA, setmaxnreg: registers move between the warp and the CTA's pool; inc waits for them.
void set_max_registers(int registers, bool increase);

// PTX ISA, ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16.
void ldmatrix_x4_trans(std::uint32_t row_address, std::uint32_t (&values)[4]);
// PTX ISA, stmatrix.sync.aligned.m8n8.x4.shared.b16.
void stmatrix_x4(std::uint32_t row_address, const std::uint32_t (&values)[4], bool transpose);

}  // namespace mcp::emulator
