// PTX ISA, Floating Point Instructions: ex2, lg2, rcp, fma, max; cvt. Subnormal operands and
// results are flushed to zero where the instruction says .ftz; values are rounded correctly, which
// is closer than the approximate instructions promise.
#pragma once

#include <engine/access.h>
#include <engine/halves.h>
#include <mcp/types.h>

#include <cstring>
#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

MCP_DEVICE float as_float(u32 bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
MCP_DEVICE u32 as_bits(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// Built-in functions: <cmath> would be most of what is read with every kernel.
MCP_DEVICE float flush_subnormal(float x) {
    return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x;
}

MCP_DEVICE float exp2_approx(float x) {
    return flush_subnormal(__builtin_exp2f(flush_subnormal(emulator::require_value(x))));
}
MCP_DEVICE float log2_approx(float x) {
    return __builtin_log2f(flush_subnormal(emulator::require_value(x)));
}
MCP_DEVICE float rcp_approx(float x) {
    return flush_subnormal(1.0f / flush_subnormal(emulator::require_value(x)));
}
MCP_DEVICE float fma(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}
MCP_DEVICE float max(float a, float b) {
    return a > b || __builtin_isnan(b) ? a : b;
}
MCP_DEVICE float min_or_nan(float a, float b) {
    return a < b || __builtin_isnan(a) ? a : b;
}
MCP_DEVICE float abs(float x) {
    return __builtin_fabsf(x);
}
MCP_DEVICE i32 max(i32 a, i32 b) {
    return a > b ? a : b;
}
MCP_DEVICE i32 min(i32 a, i32 b) {
    return a < b ? a : b;
}

template <class T>
MCP_DEVICE u32 pack2(float low, float high);
template <>
MCP_DEVICE u32 pack2<bf16>(float low, float high) {
    return emulator::float_to_bf16(emulator::require_value(low)) |
           static_cast<u32>(emulator::float_to_bf16(emulator::require_value(high))) << 16;
}
template <>
MCP_DEVICE u32 pack2<fp16>(float low, float high) {
    return emulator::float_to_fp16(emulator::require_value(low)) |
           static_cast<u32>(emulator::float_to_fp16(emulator::require_value(high))) << 16;
}
template <class T>
MCP_DEVICE f32x2 unpack2(u32 packed);
template <>
MCP_DEVICE f32x2 unpack2<bf16>(u32 packed) {
    return {as_float(packed << 16), as_float(packed & 0xffff0000u)};
}
template <>
MCP_DEVICE f32x2 unpack2<fp16>(u32 packed) {
    return {emulator::fp16_to_float(static_cast<u16>(packed)),
            emulator::fp16_to_float(static_cast<u16>(packed >> 16))};
}

}  // namespace mcp::ptx
