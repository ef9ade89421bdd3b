// Global memory as a launch names it: what a kernel may touch, and which thread has stored each
// word.
//
// A word of a result belongs to one thread, unless threads add to it: where two store it, chance
// decides whose value stays. An order inside a CTA would excuse that, and no kernel relies on one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mcp::emulator {

struct GlobalRange {
    std::string name;
    const void* begin;
    std::uint64_t bytes;
    bool is_written;
};

// Of one launch; CTAs share it. Each call fails the running thread unless its access is allowed.
class GlobalMemory {
  public:
    // Without ranges everything is allowed.
    explicit GlobalMemory(const std::vector<GlobalRange>& ranges);

    void require_load(const void* address, std::uint64_t bytes) const;
    // Through the read-only cache: not where the kernel writes.
    void require_constant_load(const void* address, std::uint64_t bytes) const;
    // Atomic additions, and bulk copies to global memory.
    void require_write(const void* address, std::uint64_t bytes) const;
    // A plain store: the running thread's alone.
    void note_store(const void* address, std::uint64_t bytes);

  private:
    // Of every 4 bytes of written memory: 1 + number of the thread in the grid, 0 where none has
    // stored. Pages of it are made where one does.
    class Storers {
      public:
        explicit Storers(std::uint64_t bytes);
        ~Storers();
        Storers(Storers&& other) noexcept;
        std::uint32_t* words() const { return words_; }  // null: no memory

      private:
        std::uint64_t size_;
        std::uint32_t* words_ = nullptr;
    };
    struct Known {
        GlobalRange range;
        Storers storers;
    };
    const Known* find(const void* address, std::uint64_t bytes, bool is_written) const;

    std::vector<Known> known_;
};

}  // namespace mcp::emulator
