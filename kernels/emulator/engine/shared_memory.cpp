#include "shared_memory.h"

#include <algorithm>

#include "cta.h"

namespace mcp::emulator {

namespace {

constexpr std::uint16_t kPoison = 0x7fa5;  // a NaN as bf16, as fp16 and, twice, as fp32

bool is_thread(std::uint16_t component) {
    return component < kMaxThreads;
}

}  // namespace

SharedMemory::SharedMemory(std::uint32_t base, std::uint32_t bytes)
    : base_(base), bytes_((bytes + 15) & ~15u), words_(bytes_.size() / 4) {
    for (std::size_t i = 0; i + 1 < bytes_.size(); i += 2) {
        bytes_[i] = kPoison & 0xff;
        bytes_[i + 1] = kPoison >> 8;
    }
}

void SharedMemory::check_range(std::uint32_t address,
                               std::uint32_t num_bytes,
                               std::uint32_t alignment) const {
    if (address % alignment != 0) {
        this_cta().fail("shared address 0x%x must be a multiple of %u", address, alignment);
    }
    if (address < base_ || address + num_bytes > base_ + size() || address + num_bytes < address) {
        this_cta().fail("shared address 0x%x .. 0x%x lies outside the CTA's 0x%x .. 0x%x", address,
                        address + num_bytes, base_, base_ + size());
    }
}

void SharedMemory::require_written(const Word& word,
                                   std::uint32_t address,
                                   std::uint32_t mask) const {
    if ((word.written & mask) != mask) {
        this_cta().fail("reads shared memory 0x%x, which nobody has written", address);
    }
}

// The write happened before `thread`'s present.
void SharedMemory::require_after_write(const Thread& thread,
                                       const Word& word,
                                       std::uint32_t address) const {
    if (word.writer == kNoComponent || thread.clock.knows({word.writer, word.write_value})) return;
    if (is_thread(word.writer)) {
        this_cta().fail(
            "shared memory 0x%x was written by thread %u, and nothing orders that write "
            "before this access",
            address, word.writer);
    }
    this_cta().fail(
        "shared memory 0x%x is written by a TMA copy that this thread has not waited for "
        "(mbarrier 0x%x, phase %u)",
        address,
        this_cta().mbarriers[static_cast<std::size_t>(word.writer - kFirstMBarrier)].address,
        word.write_value - 1);
}

// All reads since the last write happened before `thread`'s present.
void SharedMemory::require_after_reads(const Thread& thread,
                                       const Word& word,
                                       std::uint32_t address) {
    Cta& cta = this_cta();
    for (int wg = 0; wg < kMaxWarpgroups; ++wg) {
        const auto component = static_cast<std::uint16_t>(kFirstWarpgroup + wg);
        if (!thread.clock.knows({component, word.wgmma_value[wg]})) {
            cta.fail(
                "overwrites shared memory 0x%x, which a wgmma of warpgroup %d may still read: "
                "nothing since its wgmma.wait_group orders that read before this write",
                address, wg);
        }
    }
    if (!thread.clock.knows({word.bulk_reader, word.bulk_value})) {
        cta.fail(
            "overwrites shared memory 0x%x, which a bulk store of thread %d may still read: "
            "nothing since its wait_group.read orders that read before this write",
            address,
            cta.bulk_issuers[static_cast<std::size_t>(word.bulk_reader - kFirstBulk)].thread);
    }
    if (word.reader == kManyReaders) {
        const VectorClock& readers = *many_readers_[address];
        for (std::uint16_t t = 0; t < kMaxThreads; ++t) {
            if (!thread.clock.knows({t, readers.value[t]})) {
                cta.fail(
                    "overwrites shared memory 0x%x, which thread %u has read, and nothing orders "
                    "that read before this write",
                    address, t);
            }
        }
    } else if (!thread.clock.knows({word.reader, word.read_value})) {
        cta.fail(
            "overwrites shared memory 0x%x, which thread %u has read, and nothing orders that "
            "read before this write",
            address, word.reader);
    }
}

// `write` was followed by fence.proxy.async of the writing thread, and `issuer` knows that fence.
void SharedMemory::require_fenced(const Thread& issuer, Epoch write, std::uint32_t address) const {
    Cta& cta = this_cta();
    const auto& fences = cta.threads[write.component].proxy_fences;
    const auto fence = std::upper_bound(fences.begin(), fences.end(), write.value);
    if (fence == fences.end() || !issuer.clock.knows({write.component, *fence})) {
        cta.fail(
            "shared memory 0x%x was written by thread %u through the generic proxy; the async "
            "proxy needs fence.proxy.async by that thread between its write and the "
            "synchronisation",
            address, write.component);
    }
}

void SharedMemory::clear_reads(Word& word, std::uint32_t address) {
    if (word.reader == kManyReaders) many_readers_.erase(address);
    word.reader = word.bulk_reader = kNoComponent;
    word.read_value = word.bulk_value = 0;
    std::fill(std::begin(word.wgmma_value), std::end(word.wgmma_value), 0u);
}

void SharedMemory::thread_reads(Thread& thread, std::uint32_t address, std::uint32_t num_bytes) {
    for (std::uint32_t at = address; at < address + num_bytes; at += 4) {
        Word& w = word(at);
        if (w.is_mbarrier) this_cta().fail("reads the mbarrier at 0x%x as data", at);
        require_written(w, at, 0xf);
        require_after_write(thread, w, at);
        if (w.reader == kNoComponent || w.reader == thread.index) {
            w.reader = static_cast<std::uint16_t>(thread.index);
            w.read_value = thread.now();
            continue;
        }
        if (w.reader != kManyReaders) {
            auto& readers = many_readers_[at];
            readers = std::make_unique<VectorClock>();
            readers->learn({w.reader, w.read_value});
            w.reader = kManyReaders;
        }
        many_readers_[at]->learn(thread.epoch());
    }
}

void SharedMemory::thread_writes(Thread& thread, std::uint32_t address, std::uint32_t num_bytes) {
    for (std::uint32_t at = address; at < address + num_bytes; at += 4) {
        Word& w = word(at);
        if (w.is_mbarrier) this_cta().fail("overwrites the mbarrier at 0x%x", at);
        require_after_write(thread, w, at);
        require_after_reads(thread, w, at);
        clear_reads(w, at);
        w.writer = static_cast<std::uint16_t>(thread.index);
        w.write_value = thread.now();
        w.written = 0xf;
    }
}

void SharedMemory::copy_writes(const Thread& thread,
                               std::uint32_t address,
                               std::uint32_t num_bytes,
                               Epoch done) {
    for (std::uint32_t at = address; at < address + num_bytes; at += 4) {
        Word& w = word(at);
        if (w.is_mbarrier) this_cta().fail("overwrites the mbarrier at 0x%x", at);
        require_after_write(thread, w, at);
        require_after_reads(thread, w, at);
        if (is_thread(w.writer)) require_fenced(thread, {w.writer, w.write_value}, at);
        clear_reads(w, at);
        w.writer = done.component;
        w.write_value = done.value;
        w.written = 0xf;
    }
    auto* halves = reinterpret_cast<std::uint16_t*>(this->at(address));
    std::fill(halves, halves + num_bytes / 2, kPoison);
}

void SharedMemory::copy_reads(const Thread& thread,
                              std::uint32_t address,
                              std::uint32_t num_bytes,
                              Epoch done) {
    for (std::uint32_t at = address; at < address + num_bytes; at += 4) {
        Word& w = word(at);
        require_written(w, at, 0xf);
        require_after_write(thread, w, at);
        if (is_thread(w.writer)) require_fenced(thread, {w.writer, w.write_value}, at);
        if (w.bulk_reader != kNoComponent && w.bulk_reader != done.component) {
            this_cta().fail(
                "shared memory 0x%x is read by bulk stores of two threads at once, which "
                "the emulator does not follow",
                at);
        }
        w.bulk_reader = done.component;
        w.bulk_value = done.value;
    }
}

void SharedMemory::product_reads(std::uint32_t address,
                                 std::uint32_t num_bytes,
                                 Epoch done,
                                 EpochSet& writes) {
    check_range(address, num_bytes, 16);
    for (std::uint32_t at = address; at < address + num_bytes; at += 4) {
        Word& w = word(at);
        if (w.is_mbarrier) this_cta().fail("reads the mbarrier at 0x%x as data", at);
        require_written(w, at, 0xf);
        w.wgmma_value[done.component - kFirstWarpgroup] = done.value;
        const Epoch write{w.writer, w.write_value};
        if (!writes.empty() && writes.back() == write) continue;
        if (std::find(writes.begin(), writes.end(), write) == writes.end()) writes.push_back(write);
    }
}

EpochSet SharedMemory::visibility(const EpochSet& writes) const {
    EpochSet events;
    for (const Epoch& write : writes) {
        if (!is_thread(write.component)) {
            events.push_back(write);
            continue;
        }
        const auto& fences = this_cta().threads[write.component].proxy_fences;
        const auto fence = std::upper_bound(fences.begin(), fences.end(), write.value);
        events.push_back({write.component, fence == fences.end() ? UINT32_MAX : *fence});
    }
    return events;
}

void SharedMemory::require_visible(const Thread& thread,
                                   const EpochSet& writes,
                                   std::uint32_t address) const {
    for (const Epoch& write : writes) {
        Word written;
        written.writer = write.component;
        written.write_value = write.value;
        require_after_write(thread, written, address);
        if (is_thread(write.component)) require_fenced(thread, write, address);
    }
}

void SharedMemory::mark_mbarrier(std::uint32_t address) {
    word(address).is_mbarrier = word(address + 4).is_mbarrier = true;
}

}  // namespace mcp::emulator
