// PTX ISA, Data Movement and Conversion Instructions: ld, ld.global.nc, st; atom.
#pragma once

#include <engine/access.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

MCP_DEVICE u32 dynamic_shared() {
    return emulator::dynamic_shared();
}

MCP_DEVICE u32 load_shared_u32(u32 address) {
    u32 value;
    emulator::load_shared(address, &value, 4);
    return value;
}
MCP_DEVICE i32x4 load_shared_i32x4(u32 address) {
    i32x4 value;
    emulator::load_shared(address, &value, 16);
    return value;
}
MCP_DEVICE float load_shared_f32(u32 address) {
    float value;
    emulator::load_shared(address, &value, 4);
    return value;
}
MCP_DEVICE f32x2 load_shared_f32x2(u32 address) {
    f32x2 value;
    emulator::load_shared(address, &value, 8);
    return value;
}
MCP_DEVICE void store_shared_u32(u32 address, u32 value) {
    emulator::store_shared(address, &value, 4);
}
MCP_DEVICE void store_shared_i32x4(u32 address, i32x4 v) {
    emulator::store_shared(address, &v, 16);
}
MCP_DEVICE void store_shared_f32(u32 address, float value) {
    emulator::require_value(value);
    emulator::store_shared(address, &value, 4);
}
MCP_DEVICE void store_shared_f32x2(u32 address, float x, float y) {
    const f32x2 pair{emulator::require_value(x), emulator::require_value(y)};
    emulator::store_shared(address, &pair, 8);
}

template <class V>
MCP_DEVICE V load_global(const void* address) {
    V value;
    emulator::load_global(address, &value, sizeof(V));
    return value;
}
template <class V>
MCP_DEVICE void store_global(void* address, const V& value) {
    emulator::store_global(address, &value, sizeof(V));
}

MCP_DEVICE i32 load_constant_i32(const i32* address) {
    i32 value;
    emulator::load_constant(address, &value, 4);
    return value;
}
MCP_DEVICE float load_constant_f32(const float* address) {
    float value;
    emulator::load_constant(address, &value, 4);
    return value;
}
MCP_DEVICE i32x4 load_constant_i32x4(const void* address) {
    i32x4 value;
    emulator::load_constant(address, &value, 16);
    return value;
}

MCP_DEVICE i32 atomic_add(i32* address, i32 value) {
    return emulator::atomic_add(address, value);
}
MCP_DEVICE void atomic_add(float* address, float value) {
    emulator::atomic_add(address, value);
}
MCP_DEVICE void atomic_add_f32x2(float* address, float x, float y) {
    emulator::atomic_add(address, emulator::require_value(x));
    emulator::atomic_add(address + 1, emulator::require_value(y));
}
MCP_DEVICE void atomic_max(float* address, float value) {
    emulator::atomic_max(address, emulator::require_value(value));
}

}  // namespace mcp::ptx
