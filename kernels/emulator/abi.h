// What a host sees of an emulated kernel: a C interface, mirrored in library.py.
#pragma once

#include <cstdint>

// The engine hides its names (ENGINE_FLAGS of library.py), but for these.
#pragma GCC visibility push(default)
extern "C" {

struct McpEmulatorRange {
    const char* name;
    const void* begin;
    std::uint64_t bytes;
    std::int32_t is_written;
};

struct McpEmulatorLaunch {
    std::int32_t num_blocks, num_threads;
    std::uint32_t shared_bytes;
    std::int32_t registers_per_thread;
    std::uint64_t seed;
    std::int32_t host_threads, record_history;
    const McpEmulatorRange* ranges;
    std::int32_t num_ranges;
};

// Runs the kernel of this library; the result is freed with mcp_emulator_free.
void* mcp_emulator_run(const void* params, const McpEmulatorLaunch* launch);
void mcp_emulator_free(void* report);
// Empty if all was well.
const char* mcp_emulator_error(const void* report);
const char* mcp_emulator_history(const void* report);

int mcp_emulator_num_instructions();
const char* mcp_emulator_instruction(int instruction);
std::uint64_t mcp_emulator_count(const void* report, int instruction);

std::uint64_t mcp_emulator_params_bytes();
// The arguments of cuTensorMapEncodeTiled. Returns 0, or 1 with the reason in `reason`.
int mcp_emulator_encode_tiled(
    void* map,
    std::uint32_t type,
    std::uint32_t rank,
    const void* address,
    const std::uint64_t* dims,
    const std::uint64_t* strides,
    const std::uint32_t* box,
    const std::uint32_t* element_strides,
    const std::uint32_t* modes,  // interleave, swizzle, L2 promotion, fill
    char* reason,
    std::uint64_t reason_bytes);
}
#pragma GCC visibility pop
