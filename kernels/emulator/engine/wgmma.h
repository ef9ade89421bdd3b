// Warpgroup matrix multiply-accumulate. PTX ISA, Asynchronous Warpgroup Level Matrix Instructions.
//
// Each warp of a warpgroup issues the same sequence of products; a product can run once all four
// have issued it, in order, at a time that the scheduler chooses. Between issue and wait_group the
// accumulator registers hold a pattern that no computation produces, and registers given as operand
// A must keep their values.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "operand.h"
#include "shared_memory.h"

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

// The D matrix of a chain of products while they are in flight.
struct Accumulator {
    int n = 0;
    alignas(64) float values[kProductRows][kMaxProductColumns];
};

struct IssuedProduct {
    Product product;
    std::uint64_t commits = 0;  // wgmma.commit_group before it
    std::uint32_t issued_warps = 0;
    std::shared_ptr<Accumulator> accumulator;
    std::uint32_t a_registers[128][4];
    EpochSet writes;      // that the operands in shared memory depend on
    EpochSet visibility;  // what a thread must know to rely on them
};

struct Warpgroup {
    std::deque<IssuedProduct> products;
    std::uint64_t num_retired = 0;  // products dropped from the front
    std::uint64_t num_executed = 0;
};

// Registers of the 32 lanes that products read or write.
struct Registers {
    void* lanes[32];
    int count;
};

struct InFlight {
    Registers registers;
    std::shared_ptr<Accumulator> accumulator;
    std::uint64_t last_product;
};

struct OperandInFlight {
    Registers registers;
    std::uint32_t values[32][4];
    std::uint64_t product;
};

// Registers seen in a product before: their contents at the last wgmma.fence, and what the last
// wait left in them. A product may use them unfenced only in the latter state.
struct KnownRegisters {
    Registers registers;
    std::uint64_t at_fence;
    std::uint64_t at_wait;
};

struct WarpProducts {
    std::uint64_t num_issued = 0;
    std::vector<std::uint64_t> group_ends;  // products issued at each commit
    bool fenced_since_wait = false;
    std::vector<InFlight> in_flight;
    std::vector<OperandInFlight> operands;
    std::vector<KnownRegisters> known;
};

void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);
// `d` has n / 2 registers; `a` four, or null when operand A is in shared memory.
void wgmma(const Product& product, float* d, const std::uint32_t* a);

}  // namespace mcp::emulator
