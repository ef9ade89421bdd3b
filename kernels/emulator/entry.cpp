// One kernel, as the engine calls it.
// MCP_EMULATED_SOURCE is the file to include, MCP_EMULATED_ENTRY its kernel, MCP_EMULATED_PARAMS
// the type of the kernel's one parameter.
#include "kernel.h"

#include MCP_EMULATED_SOURCE

namespace mcp::emulator {

const Kernel kKernel = {
    [](const void* params) {
        MCP_EMULATED_ENTRY(*static_cast<const MCP_EMULATED_PARAMS*>(params));
    },
    sizeof(MCP_EMULATED_PARAMS),
    kMcpKernelThreads,
};

}  // namespace mcp::emulator
