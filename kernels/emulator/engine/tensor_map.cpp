#include "tensor_map.h"

#include <cstring>

namespace mcp::emulator {

namespace {

constexpr std::uint32_t kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
constexpr std::uint32_t kInterleaveNone = 0;
constexpr std::uint32_t kMaxL2Promotion = 3;
constexpr Swizzle kSwizzles[] = {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128};

bool is_float(std::uint32_t type) {
    return type >= static_cast<std::uint32_t>(TensorType::kFloat16);
}

std::string bad(const char* name, std::uint64_t value, const std::string& rule) {
    return std::string(name) + "=" + std::to_string(value) + " must " + rule;
}

std::string check_kind(const void* map, const TensorMapArguments& a) {
    if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0) return "tensorMap must be 64-byte aligned";
    if (a.type >= static_cast<std::uint32_t>(TensorType::kCount))
        return bad("dataType", a.type, "be known");
    if (a.rank < 1 || a.rank > kMaxRank) return bad("rank", a.rank, "be in 1 .. 5");
    if (a.interleave != kInterleaveNone) {
        return bad("interleave", a.interleave, "be NONE: the emulator follows no other");
    }
    if (a.swizzle > 3) return bad("swizzle", a.swizzle, "be NONE, 32B, 64B or 128B");
    if (a.l2_promotion > kMaxL2Promotion) return bad("l2Promotion", a.l2_promotion, "be in 0 .. 3");
    if (a.out_of_bounds_fill > 1) return bad("oobFill", a.out_of_bounds_fill, "be 0 or 1");
    if (a.out_of_bounds_fill == 1 && !is_float(a.type)) {
        return bad("oobFill", 1, "be zero for integer types");
    }
    const auto address = reinterpret_cast<std::uintptr_t>(a.address);
    if (address == 0 || address % 16 != 0) {
        return bad("globalAddress", address, "be a multiple of 16 and not null");
    }
    return {};
}

std::string check_shape(const TensorMapArguments& a) {
    const std::uint32_t element = kElementBytes[a.type];
    for (std::uint32_t i = 0; i < a.rank; ++i) {
        if (a.dims[i] < 1 || a.dims[i] > 1ull << 32)
            return bad("globalDim", a.dims[i], "be in 1 .. 2^32");
        if (a.box[i] < 1 || a.box[i] > 256) return bad("boxDim", a.box[i], "be in 1 .. 256");
        if (a.element_strides[i] < 1 || a.element_strides[i] > 8) {
            return bad("elementStrides", a.element_strides[i], "be in 1 .. 8");
        }
        if (a.element_strides[i] != 1) {
            return bad("elementStrides", a.element_strides[i],
                       "be 1: the emulator follows no other");
        }
    }
    for (std::uint32_t i = 0; i + 1 < a.rank; ++i) {
        if (a.strides[i] % 16 != 0 || a.strides[i] >= 1ull << 40) {
            return bad("globalStrides", a.strides[i], "be a multiple of 16 below 2^40");
        }
    }
    const std::uint64_t inner = std::uint64_t{a.box[0]} * element;
    if (inner % 16 != 0) return bad("boxDim[0] in bytes", inner, "be a multiple of 16");
    const auto width = static_cast<std::uint32_t>(kSwizzles[a.swizzle]);
    if (a.swizzle != 0 && inner > width) {
        return bad("boxDim[0] in bytes", inner,
                   "not exceed the swizzle's " + std::to_string(width) + " bytes");
    }
    return {};
}

}  // namespace

std::string encode_tiled(void* map, const TensorMapArguments& a) {
    std::string problem = check_kind(map, a);
    if (problem.empty()) problem = check_shape(a);
    if (!problem.empty()) return "cuTensorMapEncodeTiled: " + problem;
    EncodedTensorMap encoded{};
    encoded.magic = kTensorMapMagic;
    encoded.address = static_cast<std::uint8_t*>(const_cast<void*>(a.address));
    encoded.rank = static_cast<std::uint8_t>(a.rank);
    encoded.type = static_cast<std::uint8_t>(a.type);
    encoded.element_bytes = static_cast<std::uint8_t>(kElementBytes[a.type]);
    encoded.swizzle = kSwizzles[a.swizzle];
    encoded.fill_nan = static_cast<std::uint8_t>(a.out_of_bounds_fill);
    for (std::uint32_t i = 0; i < a.rank; ++i) {
        encoded.dims[i] = a.dims[i];
        encoded.box[i] = static_cast<std::uint16_t>(a.box[i]);
        if (i > 0) encoded.strides[i - 1] = a.strides[i - 1];
    }
    std::memcpy(map, &encoded, sizeof encoded);
    return {};
}

}  // namespace mcp::emulator
