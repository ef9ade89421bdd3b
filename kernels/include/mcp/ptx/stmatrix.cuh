// Stores four 8x8 matrices of 16-bit elements to shared memory.
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

// Lane l gives the 16-byte aligned address of row l%8 of matrix l/8; register i of lane l holds
// elements (l/4, 2*(l%4)) and (l/4, 2*(l%4)+1) of matrix i. All 32 lanes call together.
MCP_DEVICE void stmatrix_x4(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}
// The same, each matrix transposed: the row stored at lane l's address is column l%8.
MCP_DEVICE void stmatrix_x4_trans(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}

}  // namespace mcp::ptx
