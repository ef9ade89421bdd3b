// Warpgroup matrix multiply-accumulate. PTX ISA, Asynchronous Warpgroup Level Matrix Instructions.
//
// Each warp of a warpgroup issues the same sequence of products; a product can run once all four
// have issued it, in order, at a time that the scheduler chooses. Between issue and wait_group the
// accumulator registers hold a pattern that no computation produces, and registers given as operand
// A must keep their values.
#pragma once

#include <cstdint>

namespace mcp::emulator {

// One wgmma.mma_async; equal in all lanes and warps.
struct Product {
    int n;
    bool is_bf16;
    bool a_in_registers;
    bool transpose_a, transpose_b;  // MN-major
    bool accumulate;
    std::uint64_t a, b;  // descriptors

    bool operator==(const Product& other) const {
        return n == other.n && is_bf16 == other.is_bf16 && a_in_registers == other.a_in_registers &&
               transpose_a == other.transpose_a && transpose_b == other.transpose_b &&
               accumulate == other.accumulate && a == other.a && b == other.b;
    }
};

void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);
// `d` has n / 2 registers; `a` four, or null when operand A is in shared memory.
void wgmma(const Product& product, float* d, const std::uint32_t* a);

}  // namespace mcp::emulator
