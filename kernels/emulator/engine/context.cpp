#include "context.h"

#include <cstdint>

namespace mcp::emulator {

#ifdef MCP_EMULATOR_UCONTEXT

namespace {

// makecontext passes ints only, so two pointers travel as four halves.
void start(unsigned entry_high, unsigned entry_low, unsigned arg_high, unsigned arg_low) {
    const auto entry = (static_cast<std::uint64_t>(entry_high) << 32) | entry_low;
    const auto argument = (static_cast<std::uint64_t>(arg_high) << 32) | arg_low;
    reinterpret_cast<void (*)(void*)>(entry)(reinterpret_cast<void*>(argument));
}

}  // namespace

void make_context(
    Context& context, void* stack, std::size_t stack_bytes, void (*entry)(void*), void* argument) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = stack_bytes;
    context.state.uc_link = nullptr;
    const auto e = reinterpret_cast<std::uint64_t>(entry);
    const auto a = reinterpret_cast<std::uint64_t>(argument);
    makecontext(&context.state, reinterpret_cast<void (*)()>(start), 4,
                static_cast<unsigned>(e >> 32), static_cast<unsigned>(e),
                static_cast<unsigned>(a >> 32), static_cast<unsigned>(a));
}

void switch_context(Context& from, Context& to) {
    swapcontext(&from.state, &to.state);
}

#else

// rdi = where to save the stack pointer, rsi = the stack pointer to go on with.
asm(R"(
.text
.p2align 4
.globl mcp_emulator_switch
.hidden mcp_emulator_switch
.type mcp_emulator_switch,@function
mcp_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size mcp_emulator_switch,.-mcp_emulator_switch
.p2align 4
.globl mcp_emulator_start
.hidden mcp_emulator_start
.type mcp_emulator_start,@function
mcp_emulator_start:
    movq %r12, %rdi
    xorl %ebp, %ebp
    callq *%rbx
    ud2
.size mcp_emulator_start,.-mcp_emulator_start
)");

extern "C" void mcp_emulator_switch(void** save, void* go_on);
extern "C" void mcp_emulator_start();

void make_context(
    Context& context, void* stack, std::size_t stack_bytes, void (*entry)(void*), void* argument) {
    auto top = (reinterpret_cast<std::uintptr_t>(stack) + stack_bytes) & ~std::uintptr_t{63};
    auto* frame = reinterpret_cast<void**>(top - 72);
    // Popped in this order: r15, r14, r13, r12, rbx, rbp, return address. After the return the
    // stack is 16-byte aligned, as the ABI wants it before a call.
    frame[0] = nullptr;
    frame[1] = nullptr;
    frame[2] = nullptr;
    frame[3] = argument;
    frame[4] = reinterpret_cast<void*>(entry);
    frame[5] = nullptr;
    frame[6] = reinterpret_cast<void*>(mcp_emulator_start);
    frame[7] = nullptr;
    context.stack_pointer = frame;
}

void switch_context(Context& from, Context& to) {
    mcp_emulator_switch(&from.stack_pointer, to.stack_pointer);
}

#endif

}  // namespace mcp::emulator
