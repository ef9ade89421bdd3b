// PTX ISA, Miscellaneous Instructions: setmaxnreg.
#pragma once

#include <engine/collectives.h>
#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

template <int kRegisters>
MCP_DEVICE void set_max_registers_down() {
    emulator::set_max_registers(kRegisters, false);
}
template <int kRegisters>
MCP_DEVICE void set_max_registers_up() {
    emulator::set_max_registers(kRegisters, true);
}

}  // namespace mcp::ptx
