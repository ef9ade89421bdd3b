#include "collectives.h"

#include <cstring>

#include "warp_meeting.h"

namespace mcp::emulator {

namespace {

Thread* lanes_of(const Warp& warp) {
    Cta& cta = this_cta();
    return &cta.threads[static_cast<std::size_t>(&warp - cta.warps.data()) * kWarpLanes];
}

struct Exchange {
    std::uint32_t value;
    int source;
    std::uint32_t result;
};

std::uint32_t exchange(std::uint32_t value, int source) {
    Cta& cta = this_cta();
    Exchange mine{value, source, 0};
    collective(Instruction::kShuffle, 0, &mine, [&](Warp&, void** arguments) {
        for (int lane = 0; lane < kWarpLanes; ++lane) {
            auto& to = *static_cast<Exchange*>(arguments[lane]);
            to.result = static_cast<Exchange*>(arguments[to.source])->value;
        }
    });
    if (mine.result == kInFlight) {
        cta.fail("the value of lane %d is an accumulator in flight; wgmma.wait_group first",
                 source);
    }
    return mine.result;
}

void complete(NamedBarrier& barrier) {
    Cta& cta = this_cta();
    for (int index : barrier.waiting) {
        Thread& waiter = cta.threads[static_cast<std::size_t>(index)];
        Warp& warp = cta.warps[static_cast<std::size_t>(waiter.warp())];
        for (int lane = 0; lane < kWarpLanes; ++lane)
            lanes_of(warp)[lane].clock.join(barrier.clock);
        if (waiter.wait == Wait::kNamedBarrier) cta.wake(waiter);
    }
    barrier = NamedBarrier{};
}

// One warp arrives; `wait` says whether it also waits.
void arrive(const Warp& warp, int id, int num_threads, bool wait) {
    Cta& cta = this_cta();
    Thread& caller = *cta.running;
    if (id < 0 || id > 15) cta.fail("barrier %d must be in 0 .. 15", id);
    if (num_threads <= 0 || num_threads % kWarpLanes != 0) {
        cta.fail("thread count %d must be a positive multiple of the warp size", num_threads);
    }
    NamedBarrier& barrier = cta.named_barriers[id];
    if (barrier.expected == 0) {
        barrier.expected = num_threads;
    } else if (barrier.expected != num_threads) {
        cta.fail("barrier %d is in use with %d threads, this warp says %d", id, barrier.expected,
                 num_threads);
    }
    // A warp may arrive for others and then wait itself, but not arrive twice.
    const std::uint32_t bit = 1u << caller.warp();
    if (!wait && (barrier.arrived_warps & bit)) {
        cta.fail("warp %d arrives at barrier %d twice before it completes", caller.warp(), id);
    }
    if (!wait) barrier.arrived_warps |= bit;
    barrier.arrived += kWarpLanes;
    for (int lane = 0; lane < kWarpLanes; ++lane) {
        Thread& thread = lanes_of(warp)[lane];
        barrier.clock.join(thread.clock);
        thread.tick();
    }
    if (wait) barrier.waiting.push_back(caller.index);
    if (barrier.arrived > barrier.expected) {
        cta.fail("barrier %d of %d threads has %d arrivals", id, barrier.expected, barrier.arrived);
    }
    if (barrier.arrived == barrier.expected) {
        complete(barrier);
    } else if (wait) {
        cta.block(Wait::kNamedBarrier, static_cast<std::uint32_t>(id), 0);
    }
}

}  // namespace

std::uint32_t thread_index() {
    return static_cast<std::uint32_t>(this_thread().index);
}
std::uint32_t block_index() {
    return static_cast<std::uint32_t>(this_cta().block_index);
}
std::uint32_t num_blocks() {
    return static_cast<std::uint32_t>(this_cta().config.num_blocks);
}

std::uint32_t shuffle(std::uint32_t value, int source_lane) {
    return exchange(value, source_lane & 31);
}

std::uint32_t shuffle_xor(std::uint32_t value, int lane_mask) {
    return exchange(value, (this_thread().lane() ^ lane_mask) & 31);
}

std::uint32_t ballot(bool predicate) {
    Exchange mine{predicate, 0, 0};
    collective(Instruction::kVote, 0, &mine, [](Warp&, void** arguments) {
        std::uint32_t votes = 0;
        for (int lane = 0; lane < kWarpLanes; ++lane) {
            votes |= static_cast<Exchange*>(arguments[lane])->value << lane;
        }
        for (int lane = 0; lane < kWarpLanes; ++lane) {
            static_cast<Exchange*>(arguments[lane])->result = votes;
        }
    });
    return mine.result;
}

void sync_warp() {
    collective(Instruction::kSyncWarp, 0, nullptr, [](Warp& warp, void**) {
        VectorClock all;
        for (int lane = 0; lane < kWarpLanes; ++lane) all.join(lanes_of(warp)[lane].clock);
        for (int lane = 0; lane < kWarpLanes; ++lane) {
            lanes_of(warp)[lane].clock.join(all);
            lanes_of(warp)[lane].tick();
        }
    });
}

void bar_sync(int id, int num_threads) {
    collective(Instruction::kBarSync, static_cast<std::uint64_t>(id) << 32 | num_threads, nullptr,
               [&](Warp& warp, void**) { arrive(warp, id, num_threads, true); });
}

void bar_arrive(int id, int num_threads) {
    collective(Instruction::kBarArrive, static_cast<std::uint64_t>(id) << 32 | num_threads, nullptr,
               [&](Warp& warp, void**) { arrive(warp, id, num_threads, false); });
}

void sync_threads() {
    bar_sync(0, static_cast<int>(this_cta().threads.size()));
}

void set_max_registers(int registers, bool increase) {
    Cta& cta = this_cta();
    const std::uint64_t operands = static_cast<std::uint64_t>(registers) << 1 | increase;
    collective(Instruction::kSetMaxRegisters, operands, nullptr, [&](Warp& warp, void**) {
        const int change = registers - warp.registers_per_thread;
        if (registers < 24 || registers > 256 || registers % 8 != 0) {
            cta.fail("%d registers must be a multiple of 8 in 24 .. 256", registers);
        }
        if (increase ? change < 0 : change > 0) {
            cta.fail("%s to %d registers, but the warp has %d", increase ? "inc" : "dec", registers,
                     warp.registers_per_thread);
        }
        while (change * kWarpLanes > cta.free_registers) {
            cta.block(Wait::kRegisters, static_cast<std::uint32_t>(registers),
                      static_cast<std::uint32_t>(change * kWarpLanes));
        }
        cta.free_registers -= change * kWarpLanes;
        warp.registers_per_thread = registers;
        for (Thread& thread : cta.threads) {
            if (change < 0 && thread.wait == Wait::kRegisters) cta.wake(thread);
        }
    });
}

void ldmatrix_x4_trans(std::uint32_t row_address, std::uint32_t (&values)[4]) {
    struct Argument {
        std::uint32_t address;
        std::uint32_t* values;
    } mine{row_address, values};
    collective(Instruction::kLdmatrix, 0, &mine, [&](Warp& warp, void** arguments) {
        SharedMemory& shared = this_cta().shared;
        Thread* lanes = lanes_of(warp);
        const auto argument = [&](int lane) {
            return static_cast<const Argument*>(arguments[lane]);
        };
        for (int matrix = 0; matrix < 4; ++matrix) {
            for (int row = 0; row < 8; ++row) {
                const int giver = matrix * 8 + row;
                const std::uint32_t address = argument(giver)->address;
                shared.check_range(address, 16, 16);
                shared.thread_reads(lanes[giver], address, 16);
                for (int column = 0; column < 8; ++column) {
                    // Element (column, row) of the transposed matrix.
                    std::uint32_t& word = argument(4 * column + row / 2)->values[matrix];
                    const std::uint8_t* const half = shared.at(address) + 2 * column;
                    std::memcpy(reinterpret_cast<std::uint8_t*>(&word) + row % 2 * 2, half, 2);
                }
            }
        }
    });
}

void stmatrix_x4(std::uint32_t row_address, const std::uint32_t (&values)[4], bool transpose) {
    struct Argument {
        std::uint32_t address;
        const std::uint32_t* values;
    } mine{row_address, values};
    collective(Instruction::kStmatrix, transpose, &mine, [&](Warp& warp, void** arguments) {
        SharedMemory& shared = this_cta().shared;
        Thread* lanes = lanes_of(warp);
        const auto value = [&](int lane, int matrix) {
            return static_cast<const Argument*>(arguments[lane])->values[matrix];
        };
        for (int matrix = 0; matrix < 4; ++matrix) {
            for (int row = 0; row < 8; ++row) {
                const int giver = matrix * 8 + row;
                const std::uint32_t address =
                    static_cast<const Argument*>(arguments[giver])->address;
                shared.check_range(address, 16, 16);
                for (int pair = 0; pair < 4; ++pair) {
                    // Element (r, c) is in lane 4 * r + c / 2, half c % 2.
                    std::uint32_t word = value(4 * row + pair, matrix);
                    if (transpose) {
                        const int shift = row % 2 * 16;
                        const std::uint32_t low = value(4 * (2 * pair) + row / 2, matrix) >> shift;
                        const std::uint32_t high =
                            value(4 * (2 * pair + 1) + row / 2, matrix) >> shift;
                        word = (low & 0xffffu) | (high << 16);
                    }
                    const std::uint32_t at = address + 4 * static_cast<std::uint32_t>(pair);
                    shared.thread_writes(lanes[giver], at, 4);
                    std::memcpy(shared.at(at), &word, 4);
                }
            }
        }
    });
}

}  // namespace mcp::emulator
