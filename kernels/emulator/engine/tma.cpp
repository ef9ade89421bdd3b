#include "tma.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "cta.h"
#include "tensor_map.h"

namespace mcp::emulator {

namespace {

const EncodedTensorMap& require_map(const void* map) {
    Cta& cta = this_cta();
    if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0) {
        cta.fail("tensor map at %p must be 64-byte aligned", map);
    }
    const auto& encoded = *static_cast<const EncodedTensorMap*>(map);
    if (encoded.magic != kTensorMapMagic) cta.fail("%p holds no tensor map", map);
    return encoded;
}

// Shared memory side of a box: rows of the innermost dimension, dense, each a swizzle width wide.
void require_box(const EncodedTensorMap& map, std::uint32_t address, const BoxAt& box) {
    Cta& cta = this_cta();
    if (box.rank != map.rank)
        cta.fail("%d coordinates for a tensor map of rank %d", box.rank, map.rank);
    // An H100 answers such a start with an illegal instruction.
    if (box.start[0] * map.element_bytes % 16 != 0) {
        cta.fail("a box starts at column %d of %d bytes each: the first byte must be a multiple of 16",
                 static_cast<int>(box.start[0]), static_cast<int>(map.element_bytes));
    }
    const auto width = static_cast<std::uint32_t>(map.swizzle);
    if (map.swizzle != Swizzle::kNone) {
        if (map.inner_bytes() != width) {
            cta.fail(
                "boxes of %u bytes per row with a %u-byte swizzle: the emulator follows full rows "
                "only",
                map.inner_bytes(), width);
        }
        if (address % (8 * width) != 0) {
            cta.fail(
                "misaligned swizzled panel: 0x%x must be a multiple of %u, where the %u-byte "
                "swizzle pattern starts",
                address, 8 * width, width);
        }
    }
    cta.shared.check_range(address, map.box_bytes(), 128);
}

// Calls visit(shared address, global address or null, bytes) for each run of up to 16 bytes of the
// box.
template <class Visit>
void for_each_run(const EncodedTensorMap& map,
                  std::uint32_t address,
                  const BoxAt& box,
                  Visit visit) {
    const int element = map.element_bytes;
    const std::uint32_t rows = map.box_bytes() / map.inner_bytes();
    for (std::uint32_t row = 0; row < rows; ++row) {
        bool inside = true;
        std::uint8_t* line = map.address;
        std::uint32_t rest = row;
        for (int i = 1; i < map.rank; ++i) {
            const std::int64_t at = box.start[i] + rest % map.box[i];
            rest /= map.box[i];
            inside = inside && at >= 0 && at < static_cast<std::int64_t>(map.dims[i]);
            if (inside) line += static_cast<std::uint64_t>(at) * map.strides[i - 1];
        }
        for (std::uint32_t byte = 0; byte < map.inner_bytes();
             byte += static_cast<std::uint32_t>(element)) {
            const std::int64_t x = box.start[0] + byte / static_cast<std::uint32_t>(element);
            const bool in = inside && x >= 0 && x < static_cast<std::int64_t>(map.dims[0]);
            std::uint32_t shared = address + row * map.inner_bytes() + byte;
            if (map.swizzle != Swizzle::kNone) shared = swizzle_address(shared, map.swizzle);
            visit(shared, in ? line + x * element : nullptr, element);
        }
    }
}

std::uint64_t bytes_of(const EncodedTensorMap& map) {
    std::uint64_t bytes = map.dims[0] * map.element_bytes;
    for (int i = 1; i < map.rank; ++i) bytes += (map.dims[i] - 1) * map.strides[i - 1];
    return bytes;
}

BulkIssuer& issuer_of(const Thread& thread) {
    Cta& cta = this_cta();
    for (BulkIssuer& issuer : cta.bulk_issuers) {
        if (issuer.thread == thread.index) return issuer;
    }
    if (cta.bulk_issuers.size() == kMaxBulkIssuers) {
        cta.fail("more than %d threads issue bulk stores, which the emulator does not follow",
                 kMaxBulkIssuers);
    }
    cta.bulk_issuers.emplace_back();
    cta.bulk_issuers.back().thread = thread.index;
    cta.bulk_issuers.back().unread.push_back(0);
    cta.bulk_issuers.back().unwritten.push_back(0);
    return cta.bulk_issuers.back();
}

std::uint16_t component_of(const BulkIssuer& issuer) {
    return static_cast<std::uint16_t>(kFirstBulk + (&issuer - this_cta().bulk_issuers.data()));
}

void wake_issuer(int thread_index) {
    Cta& cta = this_cta();
    Thread& thread = cta.threads[static_cast<std::size_t>(thread_index)];
    if (thread.wait == Wait::kBulkGroup) cta.wake(thread);
}

// Other CTAs may add to the same element at the same time.
void add_atomically(float* target, float value) {
    auto* bits = reinterpret_cast<std::uint32_t*>(target);
    std::uint32_t before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
    do {
        float sum;
        std::memcpy(&sum, &before, 4);
        sum += value;
        std::memcpy(&after, &sum, 4);
    } while (!__atomic_compare_exchange_n(bits, &before, after, true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
}

void write_box(const EncodedTensorMap& map,
               const BoxAt& box,
               const std::vector<std::uint8_t>& copy,
               std::uint32_t address,
               bool add) {
    for_each_run(map, address, box, [&](std::uint32_t shared, std::uint8_t* global, int bytes) {
        if (global == nullptr) return;
        const std::uint8_t* source = copy.data() + (shared - address);
        if (!add) {
            std::memcpy(global, source, static_cast<std::size_t>(bytes));
            return;
        }
        float value;
        std::memcpy(&value, source, 4);
        add_atomically(reinterpret_cast<float*>(global), value);
    });
}

}  // namespace

// PTX ISA, cp.async.bulk.tensor, .shared::cluster.global.tile.mbarrier::complete_tx::bytes.
// Elements outside the tensor arrive as zeros, or as NaN if the map says so, and count as bytes.
void tma_load(std::uint32_t destination,
              const void* map_address,
              std::uint32_t barrier,
              BoxAt box) {
    Cta& cta = this_cta();
    cta.begin(Instruction::kTmaLoad);
    const EncodedTensorMap& map = require_map(map_address);
    require_box(map, destination, box);
    cta.global.require_load(map.address, bytes_of(map));
    const Epoch done = mbarrier_copy_issued(barrier);
    cta.shared.copy_writes(*cta.running, destination, map.box_bytes(), done);
    cta.start(0, [&cta, map, destination, barrier, box, done] {
        const std::uint8_t fill = map.fill_nan ? 0xff : 0;
        for_each_run(
            map, destination, box, [&](std::uint32_t shared, std::uint8_t* global, int bytes) {
                if (global != nullptr) {
                    std::memcpy(cta.shared.at(shared), global, static_cast<std::size_t>(bytes));
                } else {
                    std::memset(cta.shared.at(shared), fill, static_cast<std::size_t>(bytes));
                }
            });
        mbarrier_copy_completed(barrier, map.box_bytes(), done);
    });
}

// PTX ISA, cp.async.bulk.tensor and cp.reduce.async.bulk.tensor (.add),
// .global.shared::cta.bulk_group: what lies outside the tensor is not written.
void tma_store(const void* map_address, std::uint32_t source, BoxAt box, bool add) {
    Cta& cta = this_cta();
    cta.begin(add ? Instruction::kTmaReduce : Instruction::kTmaStore);
    const EncodedTensorMap& map = require_map(map_address);
    require_box(map, source, box);
    cta.global.require_write(map.address, bytes_of(map));
    if (add && map.type != static_cast<std::uint8_t>(TensorType::kFloat32)) {
        cta.fail("the emulator adds float32 only, the tensor map has type %d", map.type);
    }
    BulkIssuer& issuer = issuer_of(*cta.running);
    const std::uint32_t group = issuer.num_groups;
    cta.shared.copy_reads(*cta.running, source, map.box_bytes(), {component_of(issuer), group + 1});
    ++issuer.open;
    ++issuer.unread[group];
    ++issuer.unwritten[group];
    const int slot = component_of(issuer) - kFirstBulk;
    cta.start(0, [&cta, map, source, box, add, slot, group] {
        const std::uint8_t* begin = cta.shared.at(source);
        std::vector<std::uint8_t> copy(begin, begin + map.box_bytes());
        BulkIssuer& reader = cta.bulk_issuers[static_cast<std::size_t>(slot)];
        --reader.unread[group];
        wake_issuer(reader.thread);
        cta.start(0, [&cta, map, source, box, add, slot, group, copy = std::move(copy)] {
            write_box(map, box, copy, source, add);
            BulkIssuer& writer = cta.bulk_issuers[static_cast<std::size_t>(slot)];
            --writer.unwritten[group];
            wake_issuer(writer.thread);
        });
    });
}

void tma_prefetch(const void* map) {
    this_cta().begin(Instruction::kTmaPrefetch);
    require_map(map);
}

// PTX ISA, cp.async.bulk.commit_group: the thread's uncommitted operations form a group.
void bulk_commit() {
    Cta& cta = this_cta();
    cta.begin(Instruction::kBulkCommit);
    BulkIssuer& issuer = issuer_of(*cta.running);
    issuer.open = 0;
    ++issuer.num_groups;
    issuer.unread.push_back(0);
    issuer.unwritten.push_back(0);
}

// PTX ISA, cp.async.bulk.wait_group{.read} N: N or fewer of the most recent groups stay pending.
void bulk_wait(int pending, bool read_only) {
    Cta& cta = this_cta();
    cta.begin(Instruction::kBulkWait);
    Thread& thread = *cta.running;
    const std::uint16_t component = component_of(issuer_of(thread));
    const auto slot = static_cast<std::size_t>(component - kFirstBulk);
    const std::uint32_t num_groups = cta.bulk_issuers[slot].num_groups;
    if (num_groups <= static_cast<std::uint32_t>(pending)) return;
    const std::uint32_t end = num_groups - static_cast<std::uint32_t>(pending);
    const auto unfinished = [&] {
        const BulkIssuer& issuer = cta.bulk_issuers[slot];
        const auto& counts = read_only ? issuer.unread : issuer.unwritten;
        return std::any_of(counts.begin(), counts.begin() + end,
                           [](std::uint32_t n) { return n != 0; });
    };
    while (unfinished()) cta.block(Wait::kBulkGroup, 0, 0);
    thread.clock.learn({component, end});
}

}  // namespace mcp::emulator
