#include "global_memory.h"

#include <sys/mman.h>

#include <utility>

#include "cta.h"

namespace mcp::emulator {

GlobalMemory::GlobalMemory(const std::vector<GlobalRange>& ranges) {
    for (const GlobalRange& range : ranges) {
        known_.push_back({range, Storers(range.is_written ? range.bytes : 0)});
    }
}

GlobalMemory::Storers::Storers(std::uint64_t bytes) : size_((bytes + 3) / 4 * 4) {
    if (size_ == 0) return;
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) words_ = static_cast<std::uint32_t*>(memory);
}

GlobalMemory::Storers::Storers(Storers&& other) noexcept
    : size_(other.size_), words_(std::exchange(other.words_, nullptr)) {}

GlobalMemory::Storers::~Storers() {
    if (words_ != nullptr) munmap(words_, size_);
}

const GlobalMemory::Known* GlobalMemory::find(const void* address,
                                              std::uint64_t bytes,
                                              bool is_written) const {
    const auto* at = static_cast<const std::uint8_t*>(address);
    for (const Known& known : known_) {
        const auto* begin = static_cast<const std::uint8_t*>(known.range.begin);
        const bool holds = at >= begin && at + bytes <= begin + known.range.bytes;
        if (holds && known.range.is_written == is_written) return &known;
    }
    return nullptr;
}

void GlobalMemory::require_load(const void* address, std::uint64_t bytes) const {
    if (known_.empty() || find(address, bytes, false) || find(address, bytes, true)) return;
    this_cta().fail("global address %p + %llu lies in no buffer of the launch", address,
                    static_cast<unsigned long long>(bytes));
}

void GlobalMemory::require_constant_load(const void* address, std::uint64_t bytes) const {
    require_load(address, bytes);
    if (const Known* written = find(address, bytes, true)) {
        this_cta().fail(
            "%s at %p is written by the kernel: the read-only cache may hold what it was before",
            written->range.name.c_str(), address);
    }
}

void GlobalMemory::require_write(const void* address, std::uint64_t bytes) const {
    if (known_.empty() || find(address, bytes, true)) return;
    if (const Known* known = find(address, bytes, false)) {
        this_cta().fail("writes %s at %p, which the launch only reads", known->range.name.c_str(),
                        address);
    }
    this_cta().fail("writes global address %p + %llu, which lies in no buffer of the launch",
                    address, static_cast<unsigned long long>(bytes));
}

void GlobalMemory::note_store(const void* address, std::uint64_t bytes) {
    require_write(address, bytes);
    const Known* known = find(address, bytes, true);
    if (known == nullptr) return;
    Cta& cta = this_cta();
    std::uint32_t* const storers = known->storers.words();
    if (storers == nullptr) cta.fail("the emulator has no memory to note stores in");
    const auto begin = reinterpret_cast<std::uintptr_t>(known->range.begin);
    const auto first = (reinterpret_cast<std::uintptr_t>(address) - begin) / 4;
    const auto threads = static_cast<std::uint32_t>(cta.config.num_threads);
    const std::uint32_t self = static_cast<std::uint32_t>(cta.block_index) * threads +
                               static_cast<std::uint32_t>(cta.running->index) + 1;
    for (auto word = first; word < first + (bytes + 3) / 4; ++word) {
        const std::uint32_t before = __atomic_exchange_n(storers + word, self, __ATOMIC_RELAXED);
        if (before == 0 || before == self) continue;
        cta.fail("stores %s + %llu, which thread %u of block %u stores, too",
                 known->range.name.c_str(), static_cast<unsigned long long>(4 * word),
                 (before - 1) % threads, (before - 1) / threads);
    }
}

}  // namespace mcp::emulator
