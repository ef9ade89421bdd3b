// What the engine knows of the kernel that it is linked with: no header of the standard library
// but the smallest, since it is read with every kernel.
#pragma once

#include <cstdint>

namespace mcp::emulator {

struct Kernel {
    void (*call)(const void* params);
    std::uint64_t params_bytes;
    int max_threads;  // of its launch bounds
};

extern const Kernel kKernel;

}  // namespace mcp::emulator
