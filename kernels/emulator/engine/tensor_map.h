// Tensor maps: what cuTensorMapEncodeTiled of the CUDA driver API writes, with its argument checks.
// The 128 bytes are opaque on hardware; the emulator's hold the arguments.
#pragma once

#include <cstdint>
#include <string>

#include "operand.h"

namespace mcp::emulator {

constexpr int kMaxRank = 5;

// Values of the driver's enumerations.
enum class TensorType : std::uint32_t {
    kUint8,
    kUint16,
    kUint32,
    kInt32,
    kUint64,
    kInt64,
    kFloat16,
    kFloat32,
    kFloat64,
    kBfloat16,
    kFloat32Ftz,
    kTfloat32,
    kTfloat32Ftz,
    kCount
};

struct TensorMapArguments {
    std::uint32_t type;
    std::uint32_t rank;
    const void* address;
    const std::uint64_t* dims;             // [rank], elements, innermost first
    const std::uint64_t* strides;          // [rank - 1], bytes, of dimensions 1 ..
    const std::uint32_t* box;              // [rank]
    const std::uint32_t* element_strides;  // [rank]
    std::uint32_t interleave, swizzle, l2_promotion, out_of_bounds_fill;
};

// What the 128 bytes hold.
struct alignas(64) EncodedTensorMap {
    std::uint64_t magic;
    std::uint8_t* address;
    std::uint64_t strides[kMaxRank - 1];
    std::uint64_t dims[kMaxRank];
    std::uint16_t box[kMaxRank];
    std::uint8_t rank;
    std::uint8_t type;
    std::uint8_t element_bytes;
    std::uint8_t fill_nan;
    Swizzle swizzle;

    std::uint32_t inner_bytes() const { return std::uint32_t{box[0]} * element_bytes; }
    std::uint32_t box_bytes() const {
        std::uint32_t bytes = element_bytes;
        for (int i = 0; i < rank; ++i) bytes *= box[i];
        return bytes;
    }
};
static_assert(sizeof(EncodedTensorMap) == 128, "a tensor map has 128 bytes");
constexpr std::uint64_t kTensorMapMagic = 0x6d63702d746d6170ull;

// Writes `map`; a non-empty result says which argument the driver would refuse, and why.
std::string encode_tiled(void* map, const TensorMapArguments& arguments);

}  // namespace mcp::emulator
