// Arithmetic that is one instruction, and conversions of 16-bit floating formats.
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

// 2^x; exp2(-inf) = 0, relative error 2^-22.
MCP_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// log2(x); log2(0) = -inf, absolute error 2^-22 near 1.
MCP_DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1/x; 1/inf = 0, relative error 2^-23.
MCP_DEVICE float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// a * b + c, rounded once.
MCP_DEVICE float fma(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}
// The operand that is no NaN, if one is.
MCP_DEVICE float max(float a, float b) {
    return fmaxf(a, b);
}
// NaN if one of them is.
MCP_DEVICE float min_or_nan(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
MCP_DEVICE float abs(float x) {
    return fabsf(x);
}
MCP_DEVICE i32 max(i32 a, i32 b) {
    return a > b ? a : b;
}
MCP_DEVICE i32 min(i32 a, i32 b) {
    return a < b ? a : b;
}

MCP_DEVICE float as_float(u32 bits) {
    return __uint_as_float(bits);
}
MCP_DEVICE u32 as_bits(float x) {
    return __float_as_uint(x);
}

// Two numbers rounded to nearest even: `low` in bits 0-15, `high` in bits 16-31.
template <class T>
MCP_DEVICE u32 pack2(float low, float high);
template <>
MCP_DEVICE u32 pack2<bf16>(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <>
MCP_DEVICE u32 pack2<fp16>(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// The inverse of pack2, exact.
template <class T>
MCP_DEVICE f32x2 unpack2(u32 packed);
template <>
MCP_DEVICE f32x2 unpack2<bf16>(u32 packed) {
    return {as_float(packed << 16), as_float(packed & 0xffff0000u)};
}
template <>
MCP_DEVICE f32x2 unpack2<fp16>(u32 packed) {
    f32x2 v;
    asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}\n"
        : "=f"(v.x), "=f"(v.y)
        : "r"(packed));
    return v;
}

}  // namespace mcp::ptx
