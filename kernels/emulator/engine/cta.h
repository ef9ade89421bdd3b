// One CTA: its threads, what they wait for, and the scheduler that decides who goes on and which
// asynchronous work completes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "context.h"
#include "global_memory.h"
#include "instructions.h"
#include "launch.h"
#include "mbarrier.h"
#include "products.h"
#include "shared_memory.h"
#include "stacks.h"

namespace mcp::emulator {

constexpr int kWarpLanes = 32;
constexpr std::uint32_t kAllLanes = 0xffffffffu;

// Bit patterns of registers that hold nothing: signalling NaNs that arithmetic carries on as quiet
// NaNs with the same payload, so that the first instruction which looks can tell.
constexpr std::uint32_t kUninitialised = 0x7fa57fa5u;
constexpr std::uint32_t kInFlight = 0x7fa1beefu;

// What a blocked thread waits for; decides what a deadlock report says about it.
enum class Wait : std::uint8_t {
    kNothing,
    kLanes,
    kMBarrier,
    kNamedBarrier,
    kRegisters,
    kWgmma,
    kBulkGroup
};

struct Thread {
    int index = 0;
    bool done = false;
    Instruction instruction = Instruction::kNone;
    Wait wait = Wait::kNothing;
    std::uint32_t wait_on = 0;      // address, id or count, as `wait` says
    std::uint32_t wait_detail = 0;  // parity, or the number of threads or groups
    Context context;
    VectorClock clock;
    // Own clock values at which this thread executed fence.proxy.async, ascending.
    std::vector<std::uint32_t> proxy_fences;
    // Last phase of each mbarrier that this thread waited for; -2: none yet.
    std::int64_t observed_phase[kMaxMBarriers];

    int lane() const { return index % kWarpLanes; }
    int warp() const { return index / kWarpLanes; }
    std::uint32_t now() const { return clock.value[index]; }
    Epoch epoch() const { return {static_cast<std::uint16_t>(index), now()}; }
    // What came before is published with the old value, what follows has the new one.
    void tick() { ++clock.value[index]; }
};

// A warp-collective instruction that some lanes have reached.
struct Collective {
    Instruction instruction = Instruction::kNone;
    std::uint64_t operands = 0;  // must be equal in all lanes
    std::uint32_t arrived = 0;
    void* arguments[kWarpLanes] = {};
};

struct Warp {
    std::uint32_t ready_lanes = 0;
    std::uint32_t exited_lanes = 0;
    Collective collective;
    WarpProducts products;
    int registers_per_thread = 0;
};

struct NamedBarrier {
    int expected = 0;  // threads; 0: idle
    int arrived = 0;
    std::uint32_t arrived_warps = 0;
    VectorClock clock;
    std::vector<int> waiting;  // threads
};

// Work that completes later, when the scheduler chooses.
struct Pending {
    std::uint64_t order_key;  // work with equal non-zero keys completes in issue order
    std::function<void()> complete;
};

// Stores of one thread from shared to global memory. PTX ISA, Data Movement and Conversion
// Instructions: async-group mechanism of bulk copies.
struct BulkIssuer {
    int thread = -1;
    std::uint32_t num_groups = 0;          // committed
    std::uint32_t open = 0;                // operations since the last commit
    std::vector<std::uint32_t> unread;     // per group: operations that still read shared memory
    std::vector<std::uint32_t> unwritten;  // per group: operations that have not written
};

class Random {
  public:
    explicit Random(std::uint64_t seed)
        : state_(seed * 0x9e3779b97f4a7c15ull + 0x853c49e6748fea9bull) {}
    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    std::uint32_t below(std::uint32_t bound) {
        return static_cast<std::uint32_t>(((next() >> 32) * bound) >> 32);
    }

  private:
    std::uint64_t state_;
};

struct Failure {};

class Cta {
  public:
    // Its threads take over `stacks`, at least as many as they are.
    Cta(const LaunchConfig& config,
        GlobalMemory& global,
        int block,
        const std::function<void()>& kernel,
        Stacks& stacks);
    Cta(const Cta&) = delete;
    Cta& operator=(const Cta&) = delete;

    // Runs the CTA to its end; false: `error` says why not.
    bool run();

    // Suspends the running thread until wake().
    void block(Wait wait, std::uint32_t on, std::uint32_t detail);
    void wake(Thread& thread);
    // Lets others run; the thread stays ready.
    void yield();
    // Hands work to the scheduler.
    void start(std::uint64_t order_key, std::function<void()> complete);
    void begin(Instruction instruction);
    [[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
    void remember(const char* format, ...) __attribute__((format(printf, 2, 3)));

    const LaunchConfig& config;
    GlobalMemory& global;
    const int block_index;
    Random random;
    std::string error;
    std::string history;
    std::uint64_t counts[kNumInstructions] = {};

    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    SharedMemory shared;
    std::vector<MBarrier> mbarriers;
    NamedBarrier named_barriers[16];
    std::vector<BulkIssuer> bulk_issuers;
    int free_registers = 0;

    Thread* running = nullptr;

  private:
    static void enter(void* argument);
    void finish_thread();
    void choose_policy();
    bool complete_something();
    std::uint32_t punctual_lanes(const Warp& warp) const;
    bool others_can_go_on() const;
    int choose_warp();
    void switch_to(Thread& thread);
    [[noreturn]] void report_deadlock();
    std::string waiting_for(const Thread& thread);
    void check_end();

    const std::function<void()>& kernel_;
    Context scheduler_;
    std::vector<Pending> pending_;
    std::uint32_t ready_warps_ = 0;
    int alive_ = 0;
    // Policy, drawn from the seed.
    std::uint32_t eagerness_ = 0;  // of 1024: chance per step that asynchronous work completes
    bool starving_ = false;        // always the warp that is highest in `rank_`
    int late_thread_ = -1;  // waits while anything else can go on; -1: none
    std::vector<int> rank_;
};

// The CTA that this host thread is running; its `running` thread is the caller.
Cta& this_cta();
inline Thread& this_thread() {
    return *this_cta().running;
}

}  // namespace mcp::emulator
