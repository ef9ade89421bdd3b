#include "halves.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "access.h"

namespace mcp::emulator {

namespace {

std::vector<float> fp16_table() {
    std::vector<float> table(65536);
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const std::uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
        float magnitude;
        if (exponent == 31) {
            magnitude = fraction == 0 ? INFINITY : NAN;
        } else if (exponent == 0) {
            magnitude = std::ldexp(static_cast<float>(fraction), -24);
        } else {
            magnitude =
                std::ldexp(static_cast<float>(fraction + 1024), static_cast<int>(exponent) - 25);
        }
        table[bits] = bits >> 15 ? -magnitude : magnitude;
    }
    return table;
}

}  // namespace

// PTX ISA, cvt.rn.bf16x2.f32: to nearest even; NaN becomes 0x7fff.
std::uint16_t float_to_bf16(float value) {
    const std::uint32_t bits = bits_of(value);
    if (std::isnan(value)) return 0x7fff;
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// PTX ISA, cvt.rn.f16x2.f32: to nearest even, overflow to infinity; NaN becomes 0x7fff.
std::uint16_t float_to_fp16(float value) {
    if (std::isnan(value)) return 0x7fff;
    const auto sign = static_cast<std::uint16_t>(bits_of(value) >> 16 & 0x8000);
    const float magnitude = std::fabs(value);
    if (magnitude == 0.0f) return sign;
    if (magnitude >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7c00);
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    exponent = exponent < -13 ? -13 : exponent;  // below: subnormal, steps of 2^-24
    const float steps = std::nearbyint(std::ldexp(magnitude, 11 - exponent));  // 0 .. 2048
    const auto mantissa = static_cast<std::uint32_t>(steps);
    // 1024 steps make the implicit bit; a carry moves into the exponent by itself.
    const std::uint32_t biased = static_cast<std::uint32_t>(exponent + 13);
    return static_cast<std::uint16_t>(sign | ((biased << 10) + mantissa));
}

float bf16_to_float(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

float fp16_to_float(std::uint16_t bits) {
    static const std::vector<float> table = fp16_table();
    return table[bits];
}

}  // namespace mcp::emulator
