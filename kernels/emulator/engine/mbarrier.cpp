#include "mbarrier.h"

#include "cta.h"

namespace mcp::emulator {

namespace {

// PTX ISA, mbarrier: "Phase", "Pending count", "tx-count": arrivals 1 .. 2^20 - 1, bytes +-(2^20 -
// 1).
constexpr std::int64_t kMaxCount = (1 << 20) - 1;

MBarrier& find(std::uint32_t address) {
    Cta& cta = this_cta();
    for (MBarrier& barrier : cta.mbarriers) {
        if (barrier.address == address) return barrier;
    }
    cta.fail("0x%x holds no mbarrier; mbarrier.init it first", address);
}

std::uint16_t component_of(const MBarrier& barrier) {
    return static_cast<std::uint16_t>(kFirstMBarrier + (&barrier - this_cta().mbarriers.data()));
}

void require_initialised(const MBarrier& barrier) {
    Cta& cta = this_cta();
    if (!cta.running->clock.knows(barrier.init)) {
        cta.fail(
            "mbarrier 0x%x was initialised by thread %u, and nothing has synchronised with "
            "that thread since",
            barrier.address, barrier.init.component);
    }
}

void complete_phase_if_due(MBarrier& barrier) {
    Cta& cta = this_cta();
    if (barrier.pending != 0) return;
    if (barrier.transactions < 0) {
        cta.fail(
            "mbarrier 0x%x phase %lld: all %u arrivals came, and %lld bytes more than expected "
            "(transaction underflow)",
            barrier.address, static_cast<long long>(barrier.phase), barrier.expected,
            static_cast<long long>(-barrier.transactions));
    }
    if (barrier.transactions > 0) return;
    if (barrier.copies_in_flight != 0) {
        cta.fail(
            "mbarrier 0x%x phase %lld completes while %u copies that will complete bytes on it "
            "are in flight: fewer bytes were expected than copied",
            barrier.address, static_cast<long long>(barrier.phase), barrier.copies_in_flight);
    }
    ++barrier.phase;
    barrier.pending = barrier.expected;
    barrier.completed.join(barrier.arrivals);
    barrier.completed.learn({component_of(barrier), static_cast<std::uint32_t>(barrier.phase)});
    cta.remember("mbarrier 0x%x phase %lld completes", barrier.address,
                 static_cast<long long>(barrier.phase - 1));
    for (Thread& thread : cta.threads) {
        if (thread.wait == Wait::kMBarrier && thread.wait_on == barrier.address) cta.wake(thread);
    }
}

}  // namespace

// PTX ISA, mbarrier.init.
void mbarrier_init(std::uint32_t address, std::uint32_t count) {
    Cta& cta = this_cta();
    cta.begin(Instruction::kMBarrierInit);
    cta.shared.check_range(address, 8, 8);
    if (count < 1 || count > kMaxCount) cta.fail("count %u must be in 1 .. 2^20 - 1", count);
    for (const MBarrier& barrier : cta.mbarriers) {
        if (barrier.address == address) cta.fail("0x%x already holds an mbarrier", address);
    }
    if (cta.mbarriers.size() == kMaxMBarriers) {
        cta.fail("more than the %d mbarriers that the emulator can hold", kMaxMBarriers);
    }
    cta.shared.thread_writes(*cta.running, address, 8);
    cta.shared.mark_mbarrier(address);
    MBarrier barrier;
    barrier.address = address;
    barrier.expected = barrier.pending = count;
    barrier.init = cta.running->epoch();
    cta.mbarriers.push_back(barrier);
}

// PTX ISA, mbarrier.arrive and mbarrier.expect_tx: expect-tx comes first, then the arrival, with
// release semantics.
void mbarrier_arrive(std::uint32_t address, std::uint32_t expected_bytes, bool with_bytes) {
    Cta& cta = this_cta();
    cta.begin(with_bytes ? Instruction::kMBarrierExpectTx : Instruction::kMBarrierArrive);
    MBarrier& barrier = find(address);
    require_initialised(barrier);
    if (barrier.pending == 0) {
        cta.fail("mbarrier 0x%x phase %lld has its %u arrivals already, this one is too many",
                 address, static_cast<long long>(barrier.phase), barrier.expected);
    }
    barrier.transactions += expected_bytes;
    if (barrier.transactions > kMaxCount) {
        cta.fail("mbarrier 0x%x expects %lld bytes, allowed are 2^20 - 1", address,
                 static_cast<long long>(barrier.transactions));
    }
    --barrier.pending;
    barrier.arrivals.join(cta.running->clock);
    cta.running->tick();
    cta.remember("mbarrier 0x%x phase %lld arrive: %u arrivals and %lld bytes missing", address,
                 static_cast<long long>(barrier.phase), barrier.pending,
                 static_cast<long long>(barrier.transactions));
    complete_phase_if_due(barrier);
}

// PTX ISA, mbarrier.test_wait / mbarrier.try_wait, parity form: potentially blocking; waits for the
// completion of the phase with the given parity, which is the current or the immediately preceding
// one.
bool mbarrier_try_wait(std::uint32_t address, std::uint32_t parity) {
    Cta& cta = this_cta();
    cta.begin(Instruction::kMBarrierTryWait);
    Thread& thread = *cta.running;
    MBarrier& barrier = find(address);
    require_initialised(barrier);
    if (parity > 1) cta.fail("parity %u must be 0 or 1", parity);
    const int slot = component_of(barrier) - kFirstMBarrier;
    // The phase that the thread means: its last one again, or the next, as the parity says. Phase
    // -1 is the one "before" the first, which counts as complete.
    std::int64_t wanted = thread.observed_phase[slot];
    if (wanted == -2) {
        wanted = parity == 0 ? 0 : -1;
    } else if ((wanted & 1) != static_cast<std::int64_t>(parity)) {
        ++wanted;
    }
    if (barrier.phase <= wanted) {
        if (cta.random.below(16) == 0) {  // the time limit may end the wait first
            cta.yield();
            return false;
        }
        cta.block(Wait::kMBarrier, address, parity);
    }
    if (barrier.phase > wanted + 1) {
        cta.fail(
            "mbarrier 0x%x is out of phase: the thread waits for phase %lld (parity %u), and "
            "phase %lld has completed too, so the parity names a phase to come",
            address, static_cast<long long>(wanted), parity, static_cast<long long>(wanted + 1));
    }
    if (barrier.phase <= wanted) return false;
    thread.observed_phase[slot] = wanted;
    thread.clock.join(barrier.completed);
    return true;
}

Epoch mbarrier_copy_issued(std::uint32_t address) {
    Cta& cta = this_cta();
    MBarrier& barrier = find(address);
    require_initialised(barrier);
    if (!barrier.init_fenced || !cta.running->clock.knows(barrier.init_fence)) {
        cta.fail(
            "mbarrier 0x%x may be invisible to the asynchronous unit: its initialiser must "
            "execute fence.mbarrier_init or fence.proxy.async before the CTA synchronises",
            address);
    }
    ++barrier.copies_in_flight;
    return {component_of(barrier), static_cast<std::uint32_t>(barrier.phase + 1)};
}

void mbarrier_copy_completed(std::uint32_t address, std::uint32_t bytes, Epoch promised) {
    Cta& cta = this_cta();
    MBarrier& barrier = find(address);
    if (barrier.phase + 1 != promised.value) {
        cta.fail("a copy completes in phase %lld of mbarrier 0x%x but was issued in phase %u",
                 static_cast<long long>(barrier.phase), address, promised.value - 1);
    }
    --barrier.copies_in_flight;
    barrier.transactions -= bytes;
    if (barrier.transactions < -kMaxCount) {
        cta.fail("mbarrier 0x%x received more than 2^20 - 1 bytes before any were expected",
                 address);
    }
    cta.remember("mbarrier 0x%x phase %lld receives %u bytes: %u arrivals and %lld bytes missing",
                 address, static_cast<long long>(barrier.phase), bytes, barrier.pending,
                 static_cast<long long>(barrier.transactions));
    complete_phase_if_due(barrier);
}

}  // namespace mcp::emulator
