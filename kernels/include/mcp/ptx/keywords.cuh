// Words of the language that are not C++: spelled once here, spelled differently by the emulator.
#pragma once

#define MCP_DEVICE __device__ __forceinline__
// A kernel's entry: one CTA per multiprocessor, so that setmaxnreg has a register pool to divide.
#define MCP_KERNEL(num_threads) extern "C" __global__ void __launch_bounds__(num_threads, 1)
// A kernel's one by-value parameter, whose tensor maps can be addressed without a copy.
#define MCP_PARAMS(Type, name) const __grid_constant__ Type name
#define MCP_UNROLL _Pragma("unroll")
#define MCP_NO_UNROLL _Pragma("unroll 1")
