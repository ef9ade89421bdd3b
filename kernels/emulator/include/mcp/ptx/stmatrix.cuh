// PTX ISA, Warp-level Matrix Store Instruction: stmatrix.
#pragma once

#include <engine/collectives.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

MCP_DEVICE void stmatrix_x4(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
    emulator::stmatrix_x4(row_address, {a, b, c, d}, false);
}
MCP_DEVICE void stmatrix_x4_trans(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
    emulator::stmatrix_x4(row_address, {a, b, c, d}, true);
}

}  // namespace mcp::ptx
