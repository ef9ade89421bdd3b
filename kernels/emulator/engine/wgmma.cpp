#include "wgmma.h"

#include <algorithm>
#include <cstring>

#include "cta.h"
#include "halves.h"
#include "warp_meeting.h"

namespace mcp::emulator {

namespace {

struct Call {
    float* d;
    const std::uint32_t* a;
};

int warpgroup_of(const Warp& warp) {
    return static_cast<int>(&warp - this_cta().warps.data()) / 4;
}

// Four chains, which do not wait for each other's multiplications.
std::uint64_t hash_of(const Registers& registers) {
    constexpr int kChains = 4;
    constexpr std::uint64_t kPrime = 1099511628211ull;
    std::uint64_t hashes[kChains] = {1, 2, 3, 4};
    for (int lane = 0; lane < kWarpLanes; lane += kChains) {
        for (int i = 0; i < registers.count; ++i) {
            for (int chain = 0; chain < kChains; ++chain) {
                const auto* words =
                    static_cast<const std::uint32_t*>(registers.lanes[lane + chain]);
                hashes[chain] = (hashes[chain] ^ words[i]) * kPrime;
            }
        }
    }
    std::uint64_t hash = 1469598103934665603ull;
    for (const std::uint64_t part : hashes) hash = (hash ^ part) * kPrime;
    return hash;
}

// PTX ISA, wgmma.fence: required before the first product, and between any access to registers by
// threads and a product that uses them.
void require_fence(WarpProducts& products, const Registers& registers, const char* what) {
    Cta& cta = this_cta();
    for (const KnownRegisters& known : products.known) {
        if (known.registers.lanes[0] != registers.lanes[0] ||
            known.registers.count != registers.count) {
            continue;
        }
        const std::uint64_t now = hash_of(registers);
        if (now != known.at_fence && now != known.at_wait) {
            cta.fail(
                "%s registers changed after the last wgmma.fence; fence between the change and the "
                "product",
                what);
        }
        return;
    }
    if (!products.fenced_since_wait) {
        cta.fail("no wgmma.fence between the last access to the %s registers and the product",
                 what);
    }
    products.known.push_back({registers, hash_of(registers), 0});
}

void require_valid(const Product& product) {
    Cta& cta = this_cta();
    if (product.n < 8 || product.n > 256 || product.n % 8 != 0) {
        cta.fail("N=%d must be a multiple of 8 in 8 .. 256", product.n);
    }
    MatrixDescriptor descriptor;
    std::string problem;
    if (!product.a_in_registers) problem = decode_descriptor(product.a, descriptor);
    if (problem.empty()) problem = decode_descriptor(product.b, descriptor);
    if (!problem.empty()) cta.fail("%s", problem.c_str());
}

// Calls visit(address, mn, k) for each 16 bytes of operand [rows, 16]; 8 elements along k, or along
// mn if transposed.
template <class Visit>
void for_each_chunk(std::uint64_t bits, int rows, bool transpose, Visit visit) {
    MatrixDescriptor descriptor;
    decode_descriptor(bits, descriptor);
    if (transpose) {
        for (int chunk = 0; chunk < rows / 8; ++chunk) {
            for (int k = 0; k < kProductDepth; ++k) {
                visit(mn_major_address(descriptor, k, chunk), 8 * chunk, k);
            }
        }
    } else {
        for (int mn = 0; mn < rows; ++mn) {
            for (int chunk = 0; chunk < 2; ++chunk) {
                visit(k_major_address(descriptor, mn, chunk), mn, 8 * chunk);
            }
        }
    }
}

// Notes what the operands in shared memory were written by, and that `done` will have read them.
void read_operands(IssuedProduct& issued, Epoch done) {
    SharedMemory& shared = this_cta().shared;
    const Product& product = issued.product;
    const auto note = [&](std::uint32_t address, int, int) {
        shared.product_reads(address, 16, done, issued.writes);
    };
    if (!product.a_in_registers) for_each_chunk(product.a, kProductRows, product.transpose_a, note);
    for_each_chunk(product.b, product.n, product.transpose_b, note);
    issued.visibility = shared.visibility(issued.writes);
}

// The accumulator's entry in the warp's list, made if these registers are not in flight yet.
std::shared_ptr<Accumulator> join_accumulator(Warp& warp,
                                              IssuedProduct& issued,
                                              const Registers& registers,
                                              int warp_in_group) {
    Cta& cta = this_cta();
    WarpProducts& products = warp.products;
    for (InFlight& entry : products.in_flight) {
        const bool same =
            std::equal(registers.lanes, registers.lanes + 32, entry.registers.lanes) &&
            registers.count == entry.registers.count;
        for (int lane = 0; lane < kWarpLanes && !same; ++lane) {
            const auto* first = static_cast<const float*>(registers.lanes[lane]);
            const auto* other = static_cast<const float*>(entry.registers.lanes[lane]);
            if (first < other + entry.registers.count && other < first + registers.count) {
                cta.fail(
                    "accumulator registers overlap those of a product of another shape that is "
                    "in flight");
            }
        }
        if (!same) continue;
        for (void* lane : registers.lanes) {
            const auto* words = static_cast<const std::uint32_t*>(lane);
            if (std::any_of(words, words + registers.count,
                            [](std::uint32_t word) { return word != kInFlight; })) {
                cta.fail(
                    "accumulator registers were written while a product is in flight; "
                    "wgmma.wait_group first");
            }
        }
        entry.last_product = products.num_issued;
        return entry.accumulator;
    }
    require_fence(products, registers, "accumulator");
    if (issued.accumulator == nullptr) {
        issued.accumulator = std::make_shared<Accumulator>();
        issued.accumulator->n = issued.product.n;
    }
    for (int lane = 0; lane < kWarpLanes; ++lane) {
        auto* d = static_cast<float*>(registers.lanes[lane]);
        for (int i = 0; i < registers.count; ++i) {
            if (issued.product.accumulate) {
                std::uint32_t bits;
                std::memcpy(&bits, d + i, 4);
                if (bits == kUninitialised)
                    cta.fail("accumulator register %d was never written", i);
                const int row = 16 * warp_in_group + lane / 4 + 8 * (i >> 1 & 1);
                issued.accumulator->values[row][8 * (i >> 2) + 2 * (lane % 4) + (i & 1)] = d[i];
            }
            std::memcpy(d + i, &kInFlight, 4);
        }
    }
    products.in_flight.push_back({registers, issued.accumulator, products.num_issued});
    return issued.accumulator;
}

void take_a_registers(Warp& warp,
                      IssuedProduct& issued,
                      const Registers& registers,
                      int warp_in_group) {
    Cta& cta = this_cta();
    require_fence(warp.products, registers, "operand A");
    OperandInFlight operand;
    operand.registers = registers;
    operand.product = warp.products.num_issued;
    for (int lane = 0; lane < kWarpLanes; ++lane) {
        const auto* words = static_cast<const std::uint32_t*>(registers.lanes[lane]);
        for (int i = 0; i < 4; ++i) {
            if (words[i] == kInFlight || words[i] == kUninitialised) {
                cta.fail(
                    "operand A register %d of lane %d %s", i, lane,
                    words[i] == kInFlight ? "is an accumulator in flight" : "was never written");
            }
            operand.values[lane][i] = words[i];
            issued.a_registers[32 * warp_in_group + lane][i] = words[i];
        }
    }
    warp.products.operands.push_back(operand);
}

void load_shared_operand(std::uint64_t bits,
                         int rows,
                         bool transpose,
                         bool is_bf16,
                         float (*rows_first)[kProductDepth],
                         float (*k_first)[kMaxProductColumns]) {
    SharedMemory& shared = this_cta().shared;
    for_each_chunk(bits, rows, transpose, [&](std::uint32_t address, int mn, int k) {
        std::uint16_t halves[8];
        std::memcpy(halves, shared.at(address), 16);
        for (int i = 0; i < 8; ++i) {
            const float value = is_bf16 ? bf16_to_float(halves[i]) : fp16_to_float(halves[i]);
            const int row = transpose ? mn + i : mn, column = transpose ? k : k + i;
            if (rows_first != nullptr) {
                rows_first[row][column] = value;
            } else {
                k_first[column][row] = value;
            }
        }
    });
}

// PTX ISA, Register Fragments for wgmma.mma_async.m64nNk16: operand A, 16-bit types.
void load_register_operand(const IssuedProduct& issued, float (*a)[kProductDepth]) {
    for (int thread = 0; thread < 128; ++thread) {
        const int lane = thread % 32, row = thread / 32 * 16 + lane / 4, column = 2 * (lane % 4);
        for (int i = 0; i < 4; ++i) {
            const std::uint32_t pair = issued.a_registers[thread][i];
            for (int e = 0; e < 2; ++e) {
                const auto half = static_cast<std::uint16_t>(pair >> (16 * e));
                a[row + 8 * (i & 1)][column + 8 * (i >> 1) + e] =
                    issued.product.is_bf16 ? bf16_to_float(half) : fp16_to_float(half);
            }
        }
    }
}

void execute(Warpgroup& group) {
    Cta& cta = this_cta();
    const IssuedProduct& issued = group.products[group.num_executed - group.num_retired];
    const Product& product = issued.product;
    alignas(64) float a[kProductRows][kProductDepth];
    alignas(64) float b[kProductDepth][kMaxProductColumns];
    if (product.a_in_registers) {
        load_register_operand(issued, a);
    } else {
        load_shared_operand(product.a, kProductRows, product.transpose_a, product.is_bf16, a,
                            nullptr);
    }
    load_shared_operand(product.b, product.n, product.transpose_b, product.is_bf16, nullptr, b);
    multiply(issued.accumulator->values, a, b, product.n, product.accumulate);
    ++group.num_executed;
    group.products.pop_front();
    ++group.num_retired;
    for (Thread& thread : cta.threads) {
        if (thread.wait == Wait::kWgmma && thread.index / 128 == &group - cta.warpgroups.data()) {
            cta.wake(thread);
        }
    }
}

void issue(Warp& warp, const Product& product, void** arguments) {
    Cta& cta = this_cta();
    const int group_index = warpgroup_of(warp);
    const int warp_in_group = static_cast<int>(&warp - cta.warps.data()) % 4;
    Warpgroup& group = cta.warpgroups[static_cast<std::size_t>(group_index)];
    if (cta.threads.size() < static_cast<std::size_t>(128 * (group_index + 1))) {
        cta.fail("the warpgroup is not complete: the CTA has %zu threads", cta.threads.size());
    }
    require_valid(product);
    WarpProducts& products = warp.products;
    const std::uint64_t at = products.num_issued - group.num_retired;
    const Epoch done{static_cast<std::uint16_t>(kFirstWarpgroup + group_index),
                     static_cast<std::uint32_t>(products.num_issued + 1)};
    if (at == group.products.size()) {
        group.products.emplace_back();
        group.products.back().product = product;
        group.products.back().commits = products.group_ends.size();
        read_operands(group.products.back(), done);
    }
    IssuedProduct& issued = group.products[at];
    if (!(issued.product == product) || issued.commits != products.group_ends.size()) {
        cta.fail(
            "divergence: the warps of the warpgroup do not issue the same sequence of products");
    }
    const Thread* lanes = &cta.threads[static_cast<std::size_t>(cta.running->warp()) * kWarpLanes];
    const std::uint32_t address = static_cast<std::uint32_t>(product.b & 0x3fff) << 4;
    for (int lane = 0; lane < kWarpLanes; ++lane) {
        const VectorClock& clock = lanes[lane].clock;
        const bool visible = std::all_of(issued.visibility.begin(), issued.visibility.end(),
                                         [&](const Epoch& event) { return clock.knows(event); });
        if (!visible) cta.shared.require_visible(lanes[lane], issued.writes, address);
    }
    Registers d{{}, product.n / 2}, a{{}, 4};
    for (int lane = 0; lane < kWarpLanes; ++lane) {
        const Call& call = *static_cast<const Call*>(arguments[lane]);
        d.lanes[lane] = call.d;
        a.lanes[lane] = const_cast<std::uint32_t*>(call.a);
    }
    if (product.a_in_registers) take_a_registers(warp, issued, a, warp_in_group);
    const std::shared_ptr<Accumulator> accumulator =
        join_accumulator(warp, issued, d, warp_in_group);
    if (issued.accumulator == nullptr) issued.accumulator = accumulator;
    if (issued.accumulator != accumulator) {
        cta.fail("divergence: the warps of the warpgroup give different accumulators");
    }
    ++products.num_issued;
    issued.issued_warps |= 1u << warp_in_group;
    if (issued.issued_warps == 0xf) {
        cta.start(static_cast<std::uint64_t>(group_index) + 1, [&group] { execute(group); });
    }
}

// Gives the registers of products before `end` back to the warp's threads.
void finish(Warp& warp, std::uint64_t end) {
    Cta& cta = this_cta();
    WarpProducts& products = warp.products;
    const int warp_in_group = static_cast<int>(&warp - cta.warps.data()) % 4;
    const auto known = [&](const Registers& registers) {
        for (KnownRegisters& entry : products.known) {
            if (entry.registers.lanes[0] == registers.lanes[0] &&
                entry.registers.count == registers.count) {
                entry.at_wait = hash_of(registers);
            }
        }
    };
    for (const OperandInFlight& operand : products.operands) {
        if (operand.product >= end) continue;
        for (int lane = 0; lane < kWarpLanes; ++lane) {
            if (std::memcmp(operand.registers.lanes[lane], operand.values[lane], 16) != 0) {
                cta.fail(
                    "operand A registers of lane %d changed between wgmma.mma_async and "
                    "wgmma.wait_group",
                    lane);
            }
        }
        known(operand.registers);
    }
    for (const InFlight& entry : products.in_flight) {
        if (entry.last_product >= end) continue;
        for (int lane = 0; lane < kWarpLanes; ++lane) {
            auto* d = static_cast<float*>(entry.registers.lanes[lane]);
            for (int i = 0; i < entry.registers.count; ++i) {
                if (std::memcmp(d + i, &kInFlight, 4) != 0) {
                    cta.fail(
                        "accumulator register %d of lane %d was written between "
                        "wgmma.mma_async and wgmma.wait_group",
                        i, lane);
                }
                const int row = 16 * warp_in_group + lane / 4 + 8 * (i >> 1 & 1);
                d[i] = entry.accumulator->values[row][8 * (i >> 2) + 2 * (lane % 4) + (i & 1)];
            }
        }
        known(entry.registers);
    }
    const auto is_done = [&](const auto& entry) { return entry.last_product < end; };
    products.in_flight.erase(
        std::remove_if(products.in_flight.begin(), products.in_flight.end(), is_done),
        products.in_flight.end());
    products.operands.erase(
        std::remove_if(products.operands.begin(), products.operands.end(),
                       [&](const OperandInFlight& operand) { return operand.product < end; }),
        products.operands.end());
}

}  // namespace

// PTX ISA, wgmma.fence.sync.aligned.
void wgmma_fence() {
    collective(Instruction::kWgmmaFence, 0, nullptr, [](Warp& warp, void**) {
        warp.products.fenced_since_wait = true;
        for (KnownRegisters& known : warp.products.known) known.at_fence = hash_of(known.registers);
    });
}

// PTX ISA, wgmma.commit_group.sync.aligned: the warp's products since the last commit form a group.
void wgmma_commit() {
    collective(Instruction::kWgmmaCommit, 0, nullptr, [](Warp& warp, void**) {
        warp.products.group_ends.push_back(warp.products.num_issued);
    });
}

// PTX ISA, wgmma.wait_group.sync.aligned N: N or fewer of the most recent groups stay pending.
void wgmma_wait(int pending) {
    collective(Instruction::kWgmmaWait, static_cast<std::uint64_t>(pending), nullptr,
               [&](Warp& warp, void**) {
                   Cta& cta = this_cta();
                   WarpProducts& products = warp.products;
                   const auto kept = static_cast<std::size_t>(pending);
                   if (products.group_ends.size() <= kept) return;
                   const std::uint64_t end = *(products.group_ends.end() - 1 - pending);
                   const int group = warpgroup_of(warp);
                   while (cta.warpgroups[static_cast<std::size_t>(group)].num_executed < end) {
                       cta.block(Wait::kWgmma, static_cast<std::uint32_t>(end), 0);
                   }
                   finish(warp, end);
                   products.fenced_since_wait = false;
                   Thread* lanes =
                       &cta.threads[static_cast<std::size_t>(cta.running->warp()) * kWarpLanes];
                   for (int lane = 0; lane < kWarpLanes; ++lane) {
                       lanes[lane].clock.learn({static_cast<std::uint16_t>(kFirstWarpgroup + group),
                                                static_cast<std::uint32_t>(end)});
                   }
               });
}

// PTX ISA, wgmma.mma_async.sync.aligned.m64nNk16, f32 accumulators, bf16 or f16 operands.
void wgmma(const Product& product, float* d, const std::uint32_t* a) {
    Call call{d, a};
    const std::uint64_t operands = product.a * 31 + product.b * 17 +
                                   static_cast<std::uint64_t>(product.n) * 2 + product.accumulate;
    collective(Instruction::kWgmma, operands, &call,
               [&](Warp& warp, void** arguments) { issue(warp, product, arguments); });
}

}  // namespace mcp::emulator
