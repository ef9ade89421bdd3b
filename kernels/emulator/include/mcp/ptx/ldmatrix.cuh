// PTX ISA, Warp-level Matrix Load Instruction: ldmatrix.
#pragma once

#include <engine/collectives.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

MCP_DEVICE void ldmatrix_x4_trans(u32 row_address, u32& a, u32& b, u32& c, u32& d) {
    u32 values[4];
    emulator::ldmatrix_x4_trans(row_address, values);
    a = values[0], b = values[1], c = values[2], d = values[3];
}

}  // namespace mcp::ptx
