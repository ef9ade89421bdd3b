// Switching between the stacks of emulated threads.
//
// On x86-64 a switch saves the six callee-saved registers and the stack pointer (System V ABI) and
// takes a few nanoseconds; elsewhere, or with MCP_EMULATOR_UCONTEXT, POSIX ucontext does the same
// slowly.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(MCP_EMULATOR_UCONTEXT)
#define MCP_EMULATOR_UCONTEXT
#endif
#ifdef MCP_EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace mcp::emulator {

struct Context {
#ifdef MCP_EMULATOR_UCONTEXT
    ucontext_t state;
#else
    void* stack_pointer = nullptr;
#endif
};

// Makes `context` start `entry(argument)` on the given stack when it is first switched to.
// `entry` must never return.
void make_context(
    Context& context, void* stack, std::size_t stack_bytes, void (*entry)(void*), void* argument);

// Saves the running stack in `from` and goes on where `to` was saved.
void switch_context(Context& from, Context& to);

}  // namespace mcp::emulator
