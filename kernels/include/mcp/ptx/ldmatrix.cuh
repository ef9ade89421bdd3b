// Loads four 8x8 matrices of 16-bit elements from shared memory.
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

// What stmatrix_x4_trans has stored from the same addresses: register i of lane l receives elements
// (l/4, 2*(l%4)) and (l/4, 2*(l%4)+1) of matrix i, whose column l%8 lies at the address of lane 8 *
// i + l%8. All 32 lanes call together.
MCP_DEVICE void ldmatrix_x4_trans(u32 row_address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
        : "r"(row_address)
        : "memory");
}

}  // namespace mcp::ptx
