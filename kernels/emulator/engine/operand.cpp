#include "operand.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace mcp::emulator {

namespace {

std::string hex(std::uint64_t value) {
    char text[32];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

}  // namespace

// PTX ISA, Matrix Descriptor Format: bits 0-13 start address, 16-29 leading, 32-45 stride (all /
// 16), 49-51 base offset, 62-63 swizzle mode (0 none, 1 128-byte, 2 64-byte, 3 32-byte).
std::string decode_descriptor(std::uint64_t bits, MatrixDescriptor& descriptor) {
    static constexpr Swizzle kModes[] = {Swizzle::kNone, Swizzle::k128, Swizzle::k64, Swizzle::k32};
    constexpr std::uint64_t kReserved = 0x3ff1c000c000c000ull;
    if (bits & kReserved) {
        return "matrix descriptor " + hex(bits) + " sets reserved bits " + hex(bits & kReserved) +
               " (an offset that does not fit its 14 bits?)";
    }
    descriptor.start = static_cast<std::uint32_t>(bits & 0x3fff) << 4;
    descriptor.leading = static_cast<std::uint32_t>(bits >> 16 & 0x3fff) << 4;
    descriptor.stride = static_cast<std::uint32_t>(bits >> 32 & 0x3fff) << 4;
    descriptor.swizzle = kModes[bits >> 62];
    if (bits >> 49 & 7) {
        return "matrix descriptor " + hex(bits) +
               " has a base offset; the emulator follows panels "
               "that start where the swizzle pattern does (base offset 0)";
    }
    const std::uint32_t width = static_cast<std::uint32_t>(descriptor.swizzle);
    if (descriptor.swizzle != Swizzle::kNone && descriptor.start % (8 * width) >= width) {
        return "misaligned swizzled panel: the operand at " + hex(descriptor.start) +
               " starts inside the pattern of its " + std::to_string(width) +
               "-byte swizzle, which repeats every " + std::to_string(8 * width) +
               " bytes; align the panel to that";
    }
    return {};
}

// PTX ISA, Leading dimension byte offset and Stride dimension byte offset. K-major: groups of 8
// rows are `stride` apart; without swizzle the second chunk is `leading` away, with it in the same
// row.
std::uint32_t k_major_address(const MatrixDescriptor& d, int mn, int chunk) {
    const auto row = static_cast<std::uint32_t>(mn), c = static_cast<std::uint32_t>(chunk);
    if (d.swizzle == Swizzle::kNone)
        return d.start + row / 8 * d.stride + row % 8 * 16 + c * d.leading;
    const std::uint32_t width = static_cast<std::uint32_t>(d.swizzle);
    return swizzle_address(d.start + row / 8 * d.stride + row % 8 * width + c * 16, d.swizzle);
}

// MN-major: groups of 8 columns (of the reduction) are `stride` apart, and the next rows beyond one
// swizzle width `leading`; without swizzle these two change places.
std::uint32_t mn_major_address(const MatrixDescriptor& d, int k, int chunk) {
    const auto column = static_cast<std::uint32_t>(k), c = static_cast<std::uint32_t>(chunk);
    if (d.swizzle == Swizzle::kNone) {
        return d.start + c * d.stride + column / 8 * d.leading + column % 8 * 16;
    }
    const std::uint32_t width = static_cast<std::uint32_t>(d.swizzle);
    const std::uint32_t chunks_per_row = width / 16;
    return swizzle_address(d.start + c / chunks_per_row * d.leading + column / 8 * d.stride +
                               column % 8 * width + c % chunks_per_row * 16,
                           d.swizzle);
}

namespace {

constexpr int kBlockRows = 4;     // whose sums do not wait for each other
constexpr int kBlockColumns = 8;  // n is a multiple of 8
using Block = float __attribute__((vector_size(4 * kBlockColumns)));

__attribute__((always_inline)) inline void multiply_block(float (*d)[kMaxProductColumns],
                                                          const float (*a)[kProductDepth],
                                                          const float (*b)[kMaxProductColumns],
                                                          int column,
                                                          bool accumulate) {
    Block sum[kBlockRows] = {};
    for (int row = 0; row < kBlockRows && accumulate; ++row) {
        std::memcpy(&sum[row], d[row] + column, sizeof(Block));
    }
    for (int k = 0; k < kProductDepth; ++k) {
        Block values;
        std::memcpy(&values, b[k] + column, sizeof(Block));
        for (int row = 0; row < kBlockRows; ++row) sum[row] += a[row][k] * values;
    }
    for (int row = 0; row < kBlockRows; ++row) {
        std::memcpy(d[row] + column, &sum[row], sizeof(Block));
    }
}

}  // namespace

#if defined(__x86_64__) && defined(__GLIBC__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void multiply(float (*d)[kMaxProductColumns],
              const float (*a)[kProductDepth],
              const float (*b)[kMaxProductColumns],
              int n,
              bool accumulate) {
    for (int row = 0; row < kProductRows; row += kBlockRows) {
        for (int column = 0; column < n; column += kBlockColumns) {
            multiply_block(d + row, a + row, b, column, accumulate);
        }
    }
}

}  // namespace mcp::emulator
