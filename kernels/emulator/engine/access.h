// Loads, stores, fences and arithmetic of single threads.
#pragma once

#include <cstdint>
#include <cstring>

namespace mcp::emulator {

std::uint32_t dynamic_shared();

// PTX ISA, ld.shared and st.shared: naturally aligned, 4 to 16 bytes.
void load_shared(std::uint32_t address, void* value, std::uint32_t num_bytes);
void store_shared(std::uint32_t address, const void* value, std::uint32_t num_bytes);

// PTX ISA, ld.global.nc, ld.global, st.global and atom: fail outside the launch's buffers, when
// these are known (global_memory.h).
void load_constant(const void* address, void* value, std::uint32_t num_bytes);
void load_global(const void* address, void* value, std::uint32_t num_bytes);
void store_global(void* address, const void* value, std::uint32_t num_bytes);
std::int32_t atomic_add(std::int32_t* address, std::int32_t value);
void atomic_add(float* address, float value);
void atomic_max(float* address, float value);

// PTX ISA, fence.proxy.async: orders the thread's earlier generic accesses before the async
// proxy's.
void fence_proxy_async();
// PTX ISA, fence.mbarrier_init.release.cluster.
void fence_mbarrier_init();

[[noreturn]] void report_poison(std::uint32_t bits);

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// Fails if the register holds no value: an accumulator in flight or one never written. Quiet bit
// and sign are ignored, since arithmetic changes them.
inline float require_value(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t payload = bits & 0x7fbfffffu;
    if (payload == 0x7fa1beefu || payload == 0x7fa57fa5u) report_poison(bits);
    return value;
}

}  // namespace mcp::emulator
