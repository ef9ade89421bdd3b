// Words of the language that are not C++, as the emulator spells them.
#pragma once

#define MCP_DEVICE inline
// The number of threads is the launcher's business; the emulator's caller passes it along.
#define MCP_KERNEL(num_threads) extern "C" void
#define MCP_PARAMS(Type, name) const Type& name
#define MCP_UNROLL
#define MCP_NO_UNROLL
