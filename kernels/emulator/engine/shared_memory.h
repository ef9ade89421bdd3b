// Shared memory of a CTA, with a shadow that knows who wrote and read each 4-byte word.
//
// PTX ISA, Memory Consistency Model: threads access through the generic proxy, wgmma and TMA
// through the async proxy; an access of one proxy after a write of the other needs
// fence.proxy.async, except that waiting for the completion of asynchronous work makes its writes
// visible.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "clock.h"

namespace mcp::emulator {

struct Thread;

// Reads and writes of one word that later accesses must be ordered after.
struct Word {
    std::uint32_t write_value = 0;
    std::uint32_t read_value = 0;
    std::uint32_t bulk_value = 0;
    std::uint32_t wgmma_value[kMaxWarpgroups] = {};
    std::uint16_t writer = kNoComponent;  // a thread, or an mbarrier: written by TMA
    std::uint16_t reader = kNoComponent;  // a thread, or kManyReaders
    std::uint16_t bulk_reader = kNoComponent;
    std::uint8_t written = 0;  // one bit per byte
    bool is_mbarrier = false;
};
constexpr std::uint16_t kManyReaders = 0xfffe;

// A set of events that the reader of an operand must know; small.
using EpochSet = std::vector<Epoch>;

class SharedMemory {
  public:
    // `base` is the address of the first byte: the hardware keeps the first kilobyte.
    SharedMemory(std::uint32_t base, std::uint32_t bytes);

    std::uint32_t base() const { return base_; }
    std::uint32_t size() const { return static_cast<std::uint32_t>(bytes_.size()); }
    std::uint8_t* at(std::uint32_t address) { return bytes_.data() + (address - base_); }
    // Fails unless the bytes lie in shared memory and the address is a multiple of `alignment`.
    void check_range(std::uint32_t address, std::uint32_t num_bytes, std::uint32_t alignment) const;

    // Accesses of the running thread (or, for collective stores, of `thread`).
    void thread_reads(Thread& thread, std::uint32_t address, std::uint32_t num_bytes);
    void thread_writes(Thread& thread, std::uint32_t address, std::uint32_t num_bytes);

    // A TMA load that `thread` issues and that is complete when `done` is known.
    void copy_writes(const Thread& thread,
                     std::uint32_t address,
                     std::uint32_t num_bytes,
                     Epoch done);
    // A bulk store that `thread` issues and that has read when `done` is known.
    void copy_reads(const Thread& thread,
                    std::uint32_t address,
                    std::uint32_t num_bytes,
                    Epoch done);

    // wgmma: notes the read under `done` and adds the writes it depends on to `writes`.
    void product_reads(std::uint32_t address,
                       std::uint32_t num_bytes,
                       Epoch done,
                       EpochSet& writes);
    // What a thread must know to rely on these writes through the async proxy: a copy's completion,
    // or the first proxy fence of the writer after its write.
    EpochSet visibility(const EpochSet& writes) const;
    // Says why it does not: fails unless `thread`, about to issue asynchronous work, may rely on
    // these writes.
    void require_visible(const Thread& thread, const EpochSet& writes, std::uint32_t address) const;

    void mark_mbarrier(std::uint32_t address);

  private:
    Word& word(std::uint32_t address) { return words_[(address - base_) / 4]; }
    void require_written(const Word& word, std::uint32_t address, std::uint32_t mask) const;
    void require_after_write(const Thread& thread, const Word& word, std::uint32_t address) const;
    void require_after_reads(const Thread& thread, const Word& word, std::uint32_t address);
    void require_fenced(const Thread& issuer, Epoch write, std::uint32_t address) const;
    void clear_reads(Word& word, std::uint32_t address);

    std::uint32_t base_;
    std::vector<std::uint8_t> bytes_;
    std::vector<Word> words_;
    // Clocks of words that several threads have read since the last write, by word address.
    std::unordered_map<std::uint32_t, std::unique_ptr<VectorClock>> many_readers_;
};

}  // namespace mcp::emulator
