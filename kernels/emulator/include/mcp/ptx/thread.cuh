// PTX ISA, Special Registers: tid, ctaid, nctaid; shfl.sync, vote.sync, bar.warp.sync, bar.
#pragma once

#include <engine/collectives.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>
#include <mcp/ptx/math.cuh>

namespace mcp::ptx {

MCP_DEVICE u32 thread_index() {
    return emulator::thread_index();
}
MCP_DEVICE u32 thread_index_anew() {
    return thread_index();
}
MCP_DEVICE u32 block_index() {
    return emulator::block_index();
}
MCP_DEVICE u32 num_blocks() {
    return emulator::num_blocks();
}

MCP_DEVICE void sync_threads() {
    emulator::sync_threads();
}
MCP_DEVICE void sync_warp() {
    emulator::sync_warp();
}

MCP_DEVICE u32 shuffle(u32 value, int source_lane) {
    return emulator::shuffle(value, source_lane);
}
MCP_DEVICE i32 shuffle(i32 value, int source_lane) {
    return static_cast<i32>(emulator::shuffle(static_cast<u32>(value), source_lane));
}
MCP_DEVICE u32 shuffle_xor(u32 value, int lane_mask) {
    return emulator::shuffle_xor(value, lane_mask);
}
MCP_DEVICE float shuffle_xor(float value, int lane_mask) {
    emulator::require_value(value);
    return as_float(emulator::shuffle_xor(as_bits(value), lane_mask));
}
MCP_DEVICE bool any_lane(bool predicate) {
    return emulator::ballot(predicate) != 0;
}

}  // namespace mcp::ptx
