#include "cta.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>

namespace mcp::emulator {

namespace {

constexpr std::size_t kMaxHistoryBytes = 4 << 20;

thread_local Cta* current_cta = nullptr;

std::uint32_t shared_base(const LaunchConfig& config, int block) {
    // CUDA promises 16-byte alignment of dynamic shared memory and no more.
    Random random(config.seed ^ 0x5a5a5a5aull * static_cast<std::uint64_t>(block + 1));
    return 1024 + 16 * random.below(64);
}

int launch_registers(const LaunchConfig& config) {
    if (config.registers_per_thread > 0) return config.registers_per_thread;
    const int registers = kRegistersPerMultiprocessor / config.num_threads / 8 * 8;
    return registers > 248 ? 248 : registers;  // 255, in steps of 8
}

}  // namespace

Cta& this_cta() {
    return *current_cta;
}

Cta::Cta(const LaunchConfig& launch_config,
         GlobalMemory& global_memory,
         int block,
         const std::function<void()>& kernel,
         Stacks& stacks)
    : config(launch_config),
      global(global_memory),
      block_index(block),
      random(launch_config.seed * 1000003 + static_cast<std::uint64_t>(block)),
      threads(static_cast<std::size_t>(launch_config.num_threads)),
      warps(threads.size() / kWarpLanes),
      warpgroups((threads.size() + 127) / 128),
      shared(shared_base(launch_config, block), launch_config.shared_bytes),
      kernel_(kernel) {
    mbarriers.reserve(kMaxMBarriers);
    if (!stacks.allocated()) {
        error = "the emulator cannot allocate stacks: not enough memory";
        return;
    }
    for (std::size_t i = 0; i < threads.size(); ++i) {
        Thread& thread = threads[i];
        thread.index = static_cast<int>(i);
        std::fill(std::begin(thread.observed_phase), std::end(thread.observed_phase), -2);
        thread.tick();
        make_context(thread.context, stacks.poisoned(i), Stacks::kBytes, enter, &thread);
    }
    for (Warp& warp : warps) {
        warp.ready_lanes = kAllLanes;
        warp.registers_per_thread = launch_registers(config);
    }
    ready_warps_ = warps.size() == 32 ? kAllLanes : (1u << warps.size()) - 1;
    alive_ = static_cast<int>(threads.size());
    choose_policy();
}

// Seed 0 is kind: work completes soon. Other seeds delay it, some until nothing else can happen,
// and some let a few warps run far ahead of the others. One lane, of the first two warps of some
// warpgroup, which are those that move data in our kernels, waits while anything else can go on.
void Cta::choose_policy() {
    static constexpr std::uint32_t kEagerness[] = {0, 0, 2, 16, 128};
    eagerness_ = config.seed == 0 ? 512 : kEagerness[random.below(5)];
    starving_ = config.seed != 0 && random.below(2) == 0;
    if (config.seed != 0) {
        const std::uint32_t group = random.below(static_cast<std::uint32_t>(warpgroups.size()));
        late_thread_ = static_cast<int>(128 * group + random.below(2 * kWarpLanes));
    }
    rank_.resize(warps.size());
    for (std::size_t i = 0; i < rank_.size(); ++i) {
        rank_[i] = static_cast<int>(i);
        std::swap(rank_[i], rank_[random.below(static_cast<std::uint32_t>(i + 1))]);
    }
}

bool Cta::run() {
    if (!error.empty()) return false;
    current_cta = this;
    try {
        while (alive_ > 0) {
            if (!error.empty()) throw Failure{};
            if (!pending_.empty() && random.below(1024) < eagerness_) complete_something();
            if (ready_warps_ == 0 && complete_something()) continue;
            if (ready_warps_ == 0) report_deadlock();
            Warp& warp = warps[static_cast<std::size_t>(choose_warp())];
            std::uint32_t lanes = punctual_lanes(warp);
            if (lanes == 0 && others_can_go_on() && random.below(4096) != 0) {
                if (random.below(64) == 0) complete_something();
                continue;
            }
            if (lanes == 0) lanes = warp.ready_lanes;
            const std::uint32_t turn = random.below(kWarpLanes);
            const std::uint32_t rotated = (lanes >> turn) | (turn == 0 ? 0 : lanes << (32 - turn));
            const int lane = (__builtin_ctz(rotated) + static_cast<int>(turn)) % kWarpLanes;
            switch_to(threads[static_cast<std::size_t>(&warp - warps.data()) * kWarpLanes +
                              static_cast<std::size_t>(lane)]);
        }
        if (!error.empty()) throw Failure{};
        check_end();
        while (complete_something()) {
        }
    } catch (const Failure&) {
    }
    current_cta = nullptr;
    return error.empty();
}

// The lanes that can go on, but for the late one.
std::uint32_t Cta::punctual_lanes(const Warp& warp) const {
    const bool has_late = late_thread_ >= 0 && &warp == &warps[late_thread_ / kWarpLanes];
    return has_late ? warp.ready_lanes & ~(1u << late_thread_ % kWarpLanes) : warp.ready_lanes;
}

bool Cta::others_can_go_on() const {
    return !pending_.empty() || std::any_of(warps.begin(), warps.end(), [this](const Warp& warp) {
        return punctual_lanes(warp) != 0;
    });
}

int Cta::choose_warp() {
    const auto num_warps = static_cast<std::uint32_t>(warps.size());
    if (!starving_) {
        std::uint32_t at = random.below(num_warps);
        while ((ready_warps_ >> at & 1) == 0) at = at + 1 == num_warps ? 0 : at + 1;
        return static_cast<int>(at);
    }
    if (random.below(512) == 0) std::swap(rank_[random.below(num_warps)], rank_[0]);
    for (int warp : rank_) {
        if (ready_warps_ >> warp & 1) return warp;
    }
    return 0;
}

void Cta::switch_to(Thread& thread) {
    Warp& warp = warps[static_cast<std::size_t>(thread.warp())];
    warp.ready_lanes &= ~(1u << thread.lane());
    if (warp.ready_lanes == 0) ready_warps_ &= ~(1u << thread.warp());
    running = &thread;
    switch_context(scheduler_, thread.context);
    running = nullptr;
}

void Cta::enter(void* argument) {
    auto& thread = *static_cast<Thread*>(argument);
    Cta& cta = this_cta();
    cta.kernel_();
    cta.begin(Instruction::kExit);
    cta.finish_thread();
    Context& self = thread.context;
    switch_context(self, cta.scheduler_);
}

void Cta::finish_thread() {
    Thread& thread = *running;
    Warp& warp = warps[static_cast<std::size_t>(thread.warp())];
    if (warp.collective.arrived != 0) {
        fail("exits while lanes 0x%08x of its warp wait for all 32 in %s", warp.collective.arrived,
             name_of(warp.collective.instruction));
    }
    for (std::size_t i = 0; i < bulk_issuers.size(); ++i) {
        const BulkIssuer& issuer = bulk_issuers[i];
        if (issuer.thread != thread.index) continue;
        const std::uint32_t known = thread.clock.value[kFirstBulk + i];
        if (issuer.open != 0 || known < issuer.num_groups) {
            fail(
                "exits while bulk stores may still read shared memory: %u uncommitted, %u of %u "
                "groups "
                "waited for; cp.async.bulk.wait_group.read 0 first",
                issuer.open, known, issuer.num_groups);
        }
    }
    if (!warp.products.in_flight.empty()) {
        fail("exits with wgmma products in flight; wgmma.wait_group 0 first");
    }
    warp.exited_lanes |= 1u << thread.lane();
    thread.done = true;
    --alive_;
}

void Cta::block(Wait wait, std::uint32_t on, std::uint32_t detail) {
    Thread& thread = *running;
    thread.wait = wait;
    thread.wait_on = on;
    thread.wait_detail = detail;
    switch_context(thread.context, scheduler_);
}

void Cta::wake(Thread& thread) {
    thread.wait = Wait::kNothing;
    warps[static_cast<std::size_t>(thread.warp())].ready_lanes |= 1u << thread.lane();
    ready_warps_ |= 1u << thread.warp();
}

void Cta::yield() {
    Thread& thread = *running;
    wake(thread);
    switch_context(thread.context, scheduler_);
}

void Cta::start(std::uint64_t order_key, std::function<void()> complete) {
    pending_.push_back({order_key, std::move(complete)});
}

bool Cta::complete_something() {
    if (pending_.empty()) return false;
    std::size_t chosen = random.below(static_cast<std::uint32_t>(pending_.size()));
    const std::uint64_t key = pending_[chosen].order_key;
    if (key != 0) {
        chosen = 0;
        while (pending_[chosen].order_key != key) ++chosen;
    }
    const std::function<void()> complete = std::move(pending_[chosen].complete);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(chosen));
    complete();
    return true;
}

void Cta::begin(Instruction instruction) {
    ++counts[static_cast<int>(instruction)];
    running->instruction = instruction;
    if (config.seed != 0 && random.below(64) == 0) yield();
}

void Cta::fail(const char* format, ...) {
    char text[1024];
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    char where[256] = "";
    if (running != nullptr) {
        std::snprintf(where, sizeof where, "thread %d (warp %d, lane %d), %s: ", running->index,
                      running->warp(), running->lane(), name_of(running->instruction));
    }
    error = "block " + std::to_string(block_index) + ", " + where + text;
    if (running != nullptr) {
        const char* section = section_of(running->instruction);
        if (*section != '\0') error += std::string(" [PTX ISA, ") + section + "]";
        Thread& thread = *running;
        switch_context(thread.context, scheduler_);
    }
    throw Failure{};
}

void Cta::remember(const char* format, ...) {
    if (!config.record_history || history.size() > kMaxHistoryBytes) return;
    char text[256];
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    history += "block " + std::to_string(block_index) + " ";
    if (running != nullptr) history += "thread " + std::to_string(running->index) + " ";
    history += text;
    history += '\n';
}

void Cta::check_end() {
    for (const MBarrier& barrier : mbarriers) {
        if (barrier.copies_in_flight != 0) {
            fail(
                "the CTA ended while %u copies into its shared memory were in flight (mbarrier "
                "0x%x); wait for them before the last thread exits",
                barrier.copies_in_flight, barrier.address);
        }
        if (barrier.pending != barrier.expected || barrier.transactions != 0) {
            fail(
                "the CTA ended in the middle of phase %lld of mbarrier 0x%x, which misses %u of %u "
                "arrivals and %lld bytes: who arrives is not who was counted",
                static_cast<long long>(barrier.phase), barrier.address, barrier.pending,
                barrier.expected, static_cast<long long>(barrier.transactions));
        }
    }
    for (int id = 0; id < 16; ++id) {
        const NamedBarrier& barrier = named_barriers[id];
        if (barrier.arrived == 0) continue;
        fail("the CTA ended while %d of %d threads had arrived at barrier %d", barrier.arrived,
             barrier.expected, id);
    }
}

std::string Cta::waiting_for(const Thread& thread) {
    char text[256];
    switch (thread.wait) {
        case Wait::kLanes: {
            const Warp& warp = warps[static_cast<std::size_t>(thread.warp())];
            std::snprintf(text, sizeof text, "%s: lanes 0x%08x of warp %d have not come",
                          name_of(thread.instruction), ~warp.collective.arrived, thread.warp());
            break;
        }
        case Wait::kMBarrier: {
            for (const MBarrier& barrier : mbarriers) {
                if (barrier.address != thread.wait_on) continue;
                std::snprintf(text, sizeof text,
                              "mbarrier 0x%x parity %u: phase %lld misses %u of %u arrivals and "
                              "%lld bytes",
                              barrier.address, thread.wait_detail,
                              static_cast<long long>(barrier.phase), barrier.pending,
                              barrier.expected, static_cast<long long>(barrier.transactions));
            }
            break;
        }
        case Wait::kNamedBarrier: {
            const NamedBarrier& barrier = named_barriers[thread.wait_on];
            std::snprintf(text, sizeof text, "named barrier %u: %d of %d threads have arrived",
                          thread.wait_on, barrier.arrived, barrier.expected);
            break;
        }
        case Wait::kRegisters:
            std::snprintf(text, sizeof text,
                          "setmaxnreg.inc %u: needs %u more registers, the pool of the CTA has %d",
                          thread.wait_on, thread.wait_detail, free_registers);
            break;
        case Wait::kWgmma:
            std::snprintf(text, sizeof text,
                          "wgmma.wait_group: products that not all warps issued");
            break;
        case Wait::kBulkGroup:
            std::snprintf(text, sizeof text, "cp.async.bulk.wait_group");
            break;
        default:
            std::snprintf(text, sizeof text, "nothing");
    }
    return text;
}

void Cta::report_deadlock() {
    std::map<std::string, std::vector<int>> groups;
    int num_done = 0;
    for (const Thread& thread : threads) {
        if (thread.done) {
            ++num_done;
        } else {
            groups[waiting_for(thread)].push_back(thread.index);
        }
    }
    std::string report = "deadlock: no thread can go on and no asynchronous work is left;";
    for (const auto& [reason, members] : groups) {
        report += " threads ";
        for (std::size_t i = 0; i < members.size();) {
            std::size_t last = i;
            while (last + 1 < members.size() && members[last + 1] == members[last] + 1) ++last;
            if (i > 0) report += ",";
            report += std::to_string(members[i]);
            if (last > i) report += "-" + std::to_string(members[last]);
            i = last + 1;
        }
        report += " wait for " + reason + ";";
    }
    error = "block " + std::to_string(block_index) + ", " + report + " " +
            std::to_string(num_done) + " threads have exited";
    throw Failure{};
}

}  // namespace mcp::emulator
