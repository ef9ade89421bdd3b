// Plain types shared by the device, the emulator and the host; no CUDA and no standard header.
#pragma once

namespace mcp {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// 16-bit floating formats as bits: kernels convert explicitly (ptx/math.cuh) and never compute in
// them.
struct bf16 {
    u16 bits;
};
struct fp16 {
    u16 bits;
};

struct alignas(8) f32x2 {
    float x, y;
};
struct alignas(16) f32x4 {
    float x, y, z, w;
};
struct alignas(8) u32x2 {
    u32 x, y;
};
struct alignas(16) u32x4 {
    u32 x, y, z, w;
};
struct alignas(16) i32x4 {
    i32 x, y, z, w;
};

// What cuTensorMapEncodeTiled writes; passed by value inside a kernel's parameters.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

static_assert(sizeof(u64) == 8 && sizeof(u32) == 4 && sizeof(TensorMap) == 128, "unexpected ABI");

}  // namespace mcp
