#include "access.h"

#include "cta.h"

namespace mcp::emulator {

namespace {

Cta& begin_global(Instruction instruction, const void* address, std::uint32_t num_bytes) {
    Cta& cta = this_cta();
    cta.begin(instruction);
    if (reinterpret_cast<std::uintptr_t>(address) % num_bytes != 0) {
        cta.fail("global address %p must be a multiple of %u", address, num_bytes);
    }
    return cta;
}

// The first fence after mbarrier.init by the thread that initialised.
void fence_initialised_barriers(const Thread& thread) {
    for (MBarrier& barrier : this_cta().mbarriers) {
        if (barrier.init_fenced || barrier.init.component != thread.index) continue;
        barrier.init_fenced = true;
        barrier.init_fence = thread.epoch();
    }
}

}  // namespace

std::uint32_t dynamic_shared() {
    return this_cta().shared.base();
}

void load_shared(std::uint32_t address, void* value, std::uint32_t num_bytes) {
    Cta& cta = this_cta();
    cta.begin(Instruction::kLoadShared);
    cta.shared.check_range(address, num_bytes, num_bytes);
    cta.shared.thread_reads(*cta.running, address, num_bytes);
    std::memcpy(value, cta.shared.at(address), num_bytes);
}

void store_shared(std::uint32_t address, const void* value, std::uint32_t num_bytes) {
    Cta& cta = this_cta();
    cta.begin(Instruction::kStoreShared);
    cta.shared.check_range(address, num_bytes, num_bytes);
    cta.shared.thread_writes(*cta.running, address, num_bytes);
    std::memcpy(cta.shared.at(address), value, num_bytes);
}

void load_constant(const void* address, void* value, std::uint32_t num_bytes) {
    begin_global(Instruction::kLoadConstant, address, num_bytes)
        .global.require_constant_load(address, num_bytes);
    std::memcpy(value, address, num_bytes);
}

void load_global(const void* address, void* value, std::uint32_t num_bytes) {
    begin_global(Instruction::kLoadGlobal, address, num_bytes)
        .global.require_load(address, num_bytes);
    std::memcpy(value, address, num_bytes);
}

void store_global(void* address, const void* value, std::uint32_t num_bytes) {
    begin_global(Instruction::kStoreGlobal, address, num_bytes)
        .global.note_store(address, num_bytes);
    std::memcpy(address, value, num_bytes);
}

std::int32_t atomic_add(std::int32_t* address, std::int32_t value) {
    begin_global(Instruction::kAtomicAdd, address, 4).global.require_write(address, 4);
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

namespace {

// Replaces a float by `combine` of it, with no other write between.
template <class Combine>
void replace_float(Instruction instruction, float* address, Combine combine) {
    begin_global(instruction, address, 4).global.require_write(address, 4);
    auto* bits = reinterpret_cast<std::uint32_t*>(address);
    std::uint32_t before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
    do {
        float value;
        std::memcpy(&value, &before, 4);
        after = bits_of(combine(value));
    } while (!__atomic_compare_exchange_n(bits, &before, after, true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
}

}  // namespace

void atomic_add(float* address, float value) {
    replace_float(Instruction::kAtomicAdd, address, [=](float held) { return held + value; });
}

void atomic_max(float* address, float value) {
    replace_float(Instruction::kAtomicMax, address,
                  [=](float held) { return held < value ? value : held; });
}

void fence_proxy_async() {
    Cta& cta = this_cta();
    cta.begin(Instruction::kFenceProxyAsync);
    Thread& thread = *cta.running;
    thread.tick();
    thread.proxy_fences.push_back(thread.now());
    fence_initialised_barriers(thread);
}

void fence_mbarrier_init() {
    Cta& cta = this_cta();
    cta.begin(Instruction::kFenceMBarrierInit);
    cta.running->tick();
    fence_initialised_barriers(*cta.running);
}

void report_poison(std::uint32_t bits) {
    Cta& cta = this_cta();
    cta.running->instruction = Instruction::kArithmetic;
    cta.fail("an operand holds no value (0x%08x): %s", bits,
             (bits & 0xffff) == 0xbeef ? "it comes from an accumulator read before wgmma.wait_group"
                                       : "it comes from a register that was never written");
}

}  // namespace mcp::emulator
