// What a warpgroup and its warps know of products that are under way.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "operand.h"
#include "shared_memory.h"
#include "wgmma.h"

namespace mcp::emulator {

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

}  // namespace mcp::emulator
