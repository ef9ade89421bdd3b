// Loads, stores and atomics. Shared memory is addressed by 32-bit shared-window addresses
// everywhere.
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

// Address of the first byte of dynamic shared memory; at least 16-byte aligned, align further by
// hand.
MCP_DEVICE u32 dynamic_shared() {
    extern __shared__ u8 mcp_dynamic_shared[];
    return static_cast<u32>(__cvta_generic_to_shared(mcp_dynamic_shared));
}

MCP_DEVICE u32 load_shared_u32(u32 address) {
    u32 value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}
MCP_DEVICE i32x4 load_shared_i32x4(u32 address) {
    i32x4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
MCP_DEVICE float load_shared_f32(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}
MCP_DEVICE f32x2 load_shared_f32x2(u32 address) {
    f32x2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "r"(address)
                 : "memory");
    return v;
}
MCP_DEVICE void store_shared_u32(u32 address, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
MCP_DEVICE void store_shared_i32x4(u32 address, i32x4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}
MCP_DEVICE void store_shared_f32(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
MCP_DEVICE void store_shared_f32x2(u32 address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Global memory, `V` at once: 4 to 16 bytes, as aligned as long.
template <class V>
MCP_DEVICE V load_global(const void* address) {
    return *static_cast<const V*>(address);
}
template <class V>
MCP_DEVICE void store_global(void* address, const V& value) {
    *static_cast<V*>(address) = value;
}

// Through the read-only cache: the data must not change while the kernel runs.
MCP_DEVICE i32 load_constant_i32(const i32* address) {
    return __ldg(address);
}
MCP_DEVICE float load_constant_f32(const float* address) {
    return __ldg(address);
}
MCP_DEVICE i32x4 load_constant_i32x4(const void* address) {
    i32x4 v;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

// Returns the value before. Relaxed, whole GPU.
MCP_DEVICE i32 atomic_add(i32* address, i32 value) {
    return atomicAdd(address, value);
}
MCP_DEVICE void atomic_add(float* address, float value) {
    atomicAdd(address, value);
}
// Two neighbours, 8-byte aligned; each is added by itself.
MCP_DEVICE void atomic_add_f32x2(float* address, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y)
                 : "memory");
}

// Raises a float in memory to `value`, which is no NaN. Relaxed, whole GPU. As signed integers,
// floats from zero up rise, and are above all below zero; as unsigned ones, floats below zero fall,
// and are above all from zero up.
MCP_DEVICE void atomic_max(float* address, float value) {
    const u32 bits = __float_as_uint(value);
    if (bits >> 31) {
        atomicMin(reinterpret_cast<u32*>(address), bits);
    } else {
        atomicMax(reinterpret_cast<i32*>(address), static_cast<i32>(bits));
    }
}

}  // namespace mcp::ptx
