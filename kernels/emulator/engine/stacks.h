// The stacks of a CTA's threads. A host thread runs one CTA after another on the same ones: making
// hundreds anew takes longer than a small kernel does.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mcp::emulator {

class Stacks {
  public:
    static constexpr std::size_t kBytes = 128 * 1024;

    // Check `allocated` before anything else.
    explicit Stacks(std::size_t count);
    ~Stacks();
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;

    bool allocated() const { return memory_ != nullptr; }
    // The lowest address of one; what no thread of this CTA has written there holds no value.
    std::uint8_t* poisoned(std::size_t index);

  private:
    std::size_t count_;
    std::uint8_t* memory_ = nullptr;
};

}  // namespace mcp::emulator
