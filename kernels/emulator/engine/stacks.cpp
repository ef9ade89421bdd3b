#include "stacks.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "cta.h"

namespace mcp::emulator {

namespace {

constexpr std::size_t kPoisonedBytes = 16 * 1024;

}  // namespace

Stacks::Stacks(std::size_t count) : count_(count) {
    void* memory = mmap(nullptr, count * kBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    memory_ = static_cast<std::uint8_t*>(memory);
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    for (std::size_t i = 0; i < count; ++i) mprotect(memory_ + i * kBytes, page, PROT_NONE);
}

Stacks::~Stacks() {
    if (allocated()) munmap(memory_, count_ * kBytes);
}

std::uint8_t* Stacks::poisoned(std::size_t index) {
    std::uint8_t* stack = memory_ + index * kBytes;
    auto* poison = reinterpret_cast<std::uint32_t*>(stack + kBytes - kPoisonedBytes);
    std::fill(poison, poison + kPoisonedBytes / 4, kUninitialised);
    return stack;
}

}  // namespace mcp::emulator
