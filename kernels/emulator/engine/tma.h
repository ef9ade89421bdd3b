// Bulk tensor copies. PTX ISA, Data Movement and Conversion Instructions: Asynchronous copy, bulk
// tensor copies (tile mode), async-group and mbarrier-based completion.
#pragma once

#include <cstdint>

namespace mcp::emulator {

constexpr int kMaxCoordinates = 5;

struct BoxAt {
    int rank;
    std::int64_t start[kMaxCoordinates];
};

void tma_load(std::uint32_t destination, const void* map, std::uint32_t barrier, BoxAt box);
void tma_store(const void* map, std::uint32_t source, BoxAt box, bool add);
void tma_prefetch(const void* map);
void bulk_commit();
// `read_only`: waits until the groups have read shared memory; otherwise until they have written.
void bulk_wait(int pending, bool read_only);

}  // namespace mcp::emulator
