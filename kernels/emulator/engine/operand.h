// Matrix operands of wgmma in shared memory, and the product itself.
//
// PTX ISA, Asynchronous Warpgroup Level Matrix Shared Memory Layout: matrix descriptor format,
// swizzle modes, leading and stride dimension byte offsets.
#pragma once

#include <cstdint>
#include <string>

namespace mcp::emulator {

// Bytes of a row of the swizzle atom; 16: no swizzle. The pattern repeats every 8 rows.
enum class Swizzle : std::uint32_t { kNone = 16, k32 = 32, k64 = 64, k128 = 128 };

// Exclusive-or of the 16-byte chunk's place in its row with the row's place in the pattern, both
// taken from the address itself.
constexpr std::uint32_t swizzle_address(std::uint32_t address, Swizzle swizzle) {
    const std::uint32_t mask = static_cast<std::uint32_t>(swizzle) - 16;
    return address ^ ((address >> 3) & mask);
}

struct MatrixDescriptor {
    std::uint32_t start, leading, stride;  // bytes
    Swizzle swizzle;
};

// Decodes the 64 bits; a non-empty result says what is wrong with them.
std::string decode_descriptor(std::uint64_t bits, MatrixDescriptor& descriptor);

// Address of the 16 bytes that hold 8 neighbouring elements of an operand [mn, 16]. K-major: row
// `mn`, columns 8 * chunk ..; MN-major: rows 8 * chunk .., column `k`.
std::uint32_t k_major_address(const MatrixDescriptor& descriptor, int mn, int chunk);
std::uint32_t mn_major_address(const MatrixDescriptor& descriptor, int k, int chunk);

constexpr int kProductRows = 64;
constexpr int kProductDepth = 16;
constexpr int kMaxProductColumns = 256;

// d [64, n] = a [64, 16] b [16, n] (+ d).
void multiply(float (*d)[kMaxProductColumns],
              const float (*a)[kProductDepth],
              const float (*b)[kMaxProductColumns],
              int n,
              bool accumulate);

}  // namespace mcp::emulator
