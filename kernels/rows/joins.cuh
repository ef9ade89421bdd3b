// What the kernels of this folder share: a warp takes an item at a time, and joins all that comes
// to its row.
#pragma once

#include <mcp/platform.cuh>

#include "params.h"

namespace mcp::rows {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// A row and what it gets: parts `begin` to `end - 1` of the list.
struct JoinedRow {
    const Joins& joins;
    i64 row, begin, end;

    MCP_DEVICE JoinedRow(const Joins& joins, i64 index) : joins(joins) {
        const bool is_listed = joins.rows != nullptr;
        row = is_listed ? ptx::load_global<i64>(joins.rows + index) : index;
        begin = is_listed ? ptx::load_global<i64>(joins.begins + index) : index;
        end = is_listed ? ptx::load_global<i64>(joins.begins + index + 1) : index + 1;
    }

    MCP_DEVICE i64 part(i64 place) const {
        return joins.parts != nullptr ? ptx::load_global<i64>(joins.parts + place) : place;
    }
};

// Calls join(index, item) for all items of all rows, a warp each.
template <class Join>
MCP_DEVICE void for_each_item(i64 num_rows, int items_per_row, Join join) {
    const i64 step = static_cast<i64>(ptx::num_blocks()) * kWarps;
    i64 next = static_cast<i64>(ptx::block_index()) * kWarps + ptx::thread_index() / kWarpSize;
    for (; next < num_rows * items_per_row; next += step) {
        const i64 index = next / items_per_row;
        join(index, static_cast<int>(next - index * items_per_row));
    }
}

}  // namespace mcp::rows
