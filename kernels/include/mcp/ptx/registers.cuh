// Moves registers between the warpgroups of a CTA. PTX ISA: setmaxnreg.
// All warps of a warpgroup call; the sum over warpgroups may never exceed what the launch
// allocated.
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

template <int kRegisters>
MCP_DEVICE void set_max_registers_down() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "not encodable");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Blocks until the registers are free.
template <int kRegisters>
MCP_DEVICE void set_max_registers_up() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "not encodable");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace mcp::ptx
