// Words of the language that are not C++, as the emulator spells them.
#pragma once

#define MCP_DEVICE inline
// One kernel per translation unit: a launch may not have more threads than it was written for.
#define MCP_KERNEL(num_threads)                                     \
    [[maybe_unused]] constexpr int kMcpKernelThreads = num_threads; \
    extern "C" void
#define MCP_PARAMS(Type, name) const Type& name
#define MCP_UNROLL
#define MCP_NO_UNROLL
