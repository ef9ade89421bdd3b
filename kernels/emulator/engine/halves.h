// Numbers of 16 bits.
#pragma once

#include <cstdint>

namespace mcp::emulator {

std::uint16_t float_to_bf16(float value);
std::uint16_t float_to_fp16(float value);
float bf16_to_float(std::uint16_t bits);
float fp16_to_float(std::uint16_t bits);

}  // namespace mcp::emulator
