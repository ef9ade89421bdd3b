// Tiles of 16-bit elements in shared memory as TMA writes and wgmma reads them: panels of 64
// columns (128 bytes per row) side by side, each with the 128-byte swizzle (16-byte chunk c of row
// r lies at chunk c ^ (r % 8)).
//
//     columns   0..63       64..127          panel p starts at address + p * kRows * 128
//             [kRows x 128 B][kRows x 128 B]
#pragma once

#include <mcp/platform.cuh>

namespace mcp {

constexpr int kPanelColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kSwizzleBytes = 1024;  // the pattern's period: every panel starts at a multiple

template <int kRows_, int kColumns_>
struct Panels {
    static constexpr int kRows = kRows_;
    static constexpr int kColumns = kColumns_;
    // A last panel that is not full is still loaded whole: TMA fills columns outside the tensor
    // with zeros.
    static constexpr int kNumPanels = (kColumns + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kPanelBytes = kRows * kRowBytes;
    static constexpr int kBytes = kNumPanels * kPanelBytes;
    static_assert(kPanelBytes % kSwizzleBytes == 0, "a panel would start inside a swizzle period");

    u32 address;
};

// Fills the tile with rows [row, row + kRows) of `head`; completes kBytes on `barrier`. One thread
// calls.
template <class Tile>
MCP_DEVICE void load_panels(
    Tile tile, const TensorMap* map, u32 barrier, int head, int row, u64 cache_hint) {
    MCP_UNROLL
    for (int p = 0; p < Tile::kNumPanels; p++) {
        ptx::tma_load_3d(tile.address + p * Tile::kPanelBytes, map, barrier, p * kPanelColumns,
                         head, row, cache_hint);
    }
}

// Clears rows [first_row, kRows). All lanes of one warp call; async readers need a proxy fence
// after it.
template <class Tile>
MCP_DEVICE void clear_rows(Tile tile, int first_row) {
    for (int at = first_row * kRowBytes + lane_index() * 16; at < Tile::kPanelBytes;
         at += kWarpSize * 16) {
        MCP_UNROLL
        for (int p = 0; p < Tile::kNumPanels; p++) {
            ptx::store_shared_i32x4(tile.address + p * Tile::kPanelBytes + at, {0, 0, 0, 0});
        }
    }
}

// Where stmatrix puts what a thread has of a warpgroup's accumulator X into a tile that holds X
// transposed: in which of a row's 16-byte chunks, of 8 rows of X each, and in which row.
struct TransposedPlace {
    int chunk, row;
};
MCP_DEVICE TransposedPlace transposed_place() {
    const int thread = thread_in_warpgroup();
    const int lane = thread % kWarpSize;
    return {thread / kWarpSize * 2 + lane / 8 % 2, lane / 16 * 8 + lane % 8};
}

// Writes a warpgroup's accumulator X [64, 4 * kPacked], packed by `pack`, transposed: row first_row
// + c of the tile's panel `panel` receives column c of X. All threads of the warpgroup call; wgmma
// needs a proxy fence and a barrier after it.
template <class Tile, int kPacked>
MCP_DEVICE void store_transposed(Tile tile,
                                 int panel,
                                 int first_row,
                                 const u32 (&packed)[kPacked]) {
    static_assert(4 * kPacked <= Tile::kRows && kPanelColumns == 64, "the panel holds all of X");
    const auto [chunk, row] = transposed_place();
    const u32 address = tile.address + panel * Tile::kPanelBytes + (first_row + row) * kRowBytes +
                        ((chunk ^ (row % 8)) * 16);
    MCP_UNROLL
    for (int i = 0; i < kPacked / 4; i++) {
        ptx::stmatrix_x4_trans(address + i * 16 * kRowBytes, packed[4 * i], packed[4 * i + 1],
                               packed[4 * i + 2], packed[4 * i + 3]);
    }
}

// The same for 16 columns of X, to and from the thread's address in a tile of one panel. 16 further
// columns lie kTransposedStep bytes behind.
template <class Tile>
MCP_DEVICE u32 transposed_address(Tile tile, int first_row = 0) {
    const auto [chunk, row] = transposed_place();
    return tile.address + (first_row + row) * kRowBytes + ((chunk ^ (row % 8)) * 16);
}
constexpr int kTransposedStep = 16 * kRowBytes;
MCP_DEVICE void store_transposed_part(u32 address, const u32* packed) {
    ptx::stmatrix_x4_trans(address, packed[0], packed[1], packed[2], packed[3]);
}
MCP_DEVICE void load_transposed_part(u32 address, u32* packed) {
    ptx::ldmatrix_x4_trans(address, packed[0], packed[1], packed[2], packed[3]);
}

// Clears the rows of the tile whose bit is 0; bit c of lane l stands for row 32 * c + l, and is 1
// where there is no such row. All lanes of one warp call.
template <class Tile>
MCP_DEVICE void clear_rows_but(Tile tile, u32 used) {
    static_assert(Tile::kRows <= 1024, "one bit per 32 rows");
    for (int c = 0; c < (Tile::kRows + kWarpSize - 1) / kWarpSize; c++) {
        if (used >> c & 1) continue;
        const u32 row = tile.address + (c * kWarpSize + lane_index()) * kRowBytes;
        for (int at = 0; at < kRowBytes; at += 16) {
            MCP_UNROLL
            for (int p = 0; p < Tile::kNumPanels; p++) {
                ptx::store_shared_i32x4(row + p * Tile::kPanelBytes + at, {0, 0, 0, 0});
            }
        }
    }
}

// Writes a warpgroup's accumulator [64, 2 * kSize] in fp32 as TMA stores it: panels of 32 columns
// with the 128-byte swizzle, `panel_rows` rows each. `row` is the thread's first row, in the
// panels; `column` its first column. The swizzle leaves rows 2 r and 2 r + 1 of the same 8 columns
// in the same banks: odd rows write the 8 columns that lie 16 away.
template <int kSize>
MCP_DEVICE void store_f32_panels(
    u32 panels, int panel_rows, int row, int column, const float (&d)[kSize]) {
    static_assert(kSize % 16 == 0, "whole panels");
    const bool is_odd = row % 2 != 0;
    const int chunk = column / 4 ^ row % 8 ^ (is_odd ? 4 : 0);
    const u32 first = panels + row * kRowBytes + chunk * 16 + column % 4 * 4;
    MCP_UNROLL
    for (int i = 0; i < kSize / 4; i++) {
        const u32 at = (first ^ (i % 4 * 32)) + i / 4 * panel_rows * kRowBytes;
        const int own = 4 * i, away = 4 * (i ^ 2);
        ptx::store_shared_f32x2(at, is_odd ? d[away] : d[own], is_odd ? d[away + 1] : d[own + 1]);
        ptx::store_shared_f32x2(at + 8 * kRowBytes, is_odd ? d[away + 2] : d[own + 2],
                                is_odd ? d[away + 3] : d[own + 3]);
    }
}

// Matrix descriptors of wgmma. Bits 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride
// offset / 16, 62 swizzle.
MCP_DEVICE u64 make_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
    return static_cast<u64>((address & 0x3ffffu) >> 4) |
           (static_cast<u64>(leading_bytes >> 4) << 16) |
           (static_cast<u64>(stride_bytes >> 4) << 32) | (1ull << 62);
}
// Moves a descriptor by a constant: only the low word changes, so a step costs one 32-bit addition.
MCP_DEVICE u64 step_descriptor(u64 descriptor, int bytes) {
    const u32 low = static_cast<u32>(descriptor) + static_cast<u32>(bytes >> 4);
    return (descriptor & 0xffffffff00000000ull) | low;
}

// An operand whose reduction runs along the columns (Q and K of Q K'): 8-row groups are 1024 bytes
// apart.
MCP_DEVICE u64 k_major_descriptor(u32 address) {
    return make_descriptor(address, 16, kSwizzleBytes);
}
// An operand whose reduction runs along the rows (V of P V): panels lead, 8-row groups stride.
template <class Tile>
MCP_DEVICE u64 mn_major_descriptor(Tile tile) {
    return make_descriptor(tile.address, Tile::kPanelBytes, kSwizzleBytes);
}
// Offset of reduction step `k` (16 columns) of a K-major operand.
template <class Tile>
MCP_DEVICE constexpr int k_major_step(int k) {
    return k / 4 * Tile::kPanelBytes + k % 4 * 32;
}
constexpr int kMnMajorStep = 16 * kRowBytes;

}  // namespace mcp
