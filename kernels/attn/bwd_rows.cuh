// The two small kernels around the backward kernel. Both stream rows: a warp takes 8 rows of one or
// more neighbouring heads at a time, a lane 8 columns of them, so that a load has 16 bytes and 8 or
// more of them are in flight.
#pragma once

#include <mcp/fragment.cuh>
#include <mcp/platform.cuh>

#include "params.h"

namespace mcp::attn {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarpSize;
constexpr int kRowsAtOnce = 8;
constexpr int kColumnsAtOnce = 8;

// What a lane works on: columns [column, column + 8) of a head, of rows from `row` on.
template <int kColumns>
struct RowBlock {
    static constexpr int kLanes = kColumns <= 64 ? 8 : kColumns <= 128 ? 16 : 32;  // of a row
    static constexpr int kHeads = kWarpSize / kLanes;

    i32 row, head, column;
    bool valid;  // the head and the columns exist

    MCP_DEVICE RowBlock(i64 index, i32 num_heads) {
        const i32 head_blocks = (num_heads + kHeads - 1) / kHeads;
        row = static_cast<i32>(index / head_blocks) * kRowsAtOnce;
        head = static_cast<i32>(index % head_blocks) * kHeads + lane_index() / kLanes;
        column = lane_index() % kLanes * kColumnsAtOnce;
        valid = head < num_heads && column < kColumns;
    }

    // How many blocks there are; warps take them in turn.
    MCP_DEVICE static i64 count(i32 num_rows, i32 num_heads) {
        const i32 row_blocks = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
        return static_cast<i64>(row_blocks) * ((num_heads + kHeads - 1) / kHeads);
    }
    MCP_DEVICE static i64 first() {
        return static_cast<i64>(ptx::block_index()) * kRowWarps + ptx::thread_index() / kWarpSize;
    }
    MCP_DEVICE static i64 step() { return static_cast<i64>(ptx::num_blocks()) * kRowWarps; }
};

// A lane's 8 columns of a row as they lie in memory, 16-byte aligned: float, or 16 bits each.
template <class T>
struct RowPart {
    u32x4 words;

    MCP_DEVICE void load(const void* tensor, i64 at) {
        words = ptx::load_global<u32x4>(static_cast<const u16*>(tensor) + at);
    }
    MCP_DEVICE void unpack(float (&x)[kColumnsAtOnce]) const {
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
        MCP_UNROLL
        for (int i = 0; i < 4; i++) {
            const f32x2 pair = ptx::unpack2<T>(pairs[i]);
            x[2 * i] = pair.x;
            x[2 * i + 1] = pair.y;
        }
    }
    MCP_DEVICE static void store(void* tensor, i64 at, const float (&x)[kColumnsAtOnce]) {
        ptx::store_global<u32x4>(static_cast<u16*>(tensor) + at,
                                 {ptx::pack2<T>(x[0], x[1]), ptx::pack2<T>(x[2], x[3]),
                                  ptx::pack2<T>(x[4], x[5]), ptx::pack2<T>(x[6], x[7])});
    }
};
template <>
struct RowPart<float> {
    f32x4 halves[2];

    MCP_DEVICE void load(const void* tensor, i64 at) {
        const float* from = static_cast<const float*>(tensor) + at;
        halves[0] = ptx::load_global<f32x4>(from);
        halves[1] = ptx::load_global<f32x4>(from + 4);
    }
    MCP_DEVICE void unpack(float (&x)[kColumnsAtOnce]) const {
        MCP_UNROLL
        for (int i = 0; i < 2; i++) {
            x[4 * i] = halves[i].x, x[4 * i + 1] = halves[i].y;
            x[4 * i + 2] = halves[i].z, x[4 * i + 3] = halves[i].w;
        }
    }
    MCP_DEVICE static void store(void* tensor, i64 at, const float (&x)[kColumnsAtOnce]) {
        float* to = static_cast<float*>(tensor) + at;
        ptx::store_global<f32x4>(to, {x[0], x[1], x[2], x[3]});
        ptx::store_global<f32x4>(to + 4, {x[4], x[5], x[6], x[7]});
    }
};

// Writes lse and delta of one row and head to one copy. A row for which a copy has no place before
// its first clears one behind its last.
MCP_DEVICE void store_stats(
    const BwdPreprocessParams& params, i32 copy, i32 row, i32 head, float lse_2, float delta) {
    const bool has_place = row >= copy;
    const i32 at = row - copy + (has_place ? 0 : params.num_rows);
    if (at < 0) return;
    const i64 line = static_cast<i64>(copy * params.num_heads + head) * params.padded_rows;
    ptx::store_global<float>(params.lse_2 + line + at, has_place ? lse_2 : 0.0f);
    ptx::store_global<float>(params.delta + line + at, has_place ? delta : 0.0f);
}

// A lane per row, and per copy while there are lanes: neighbouring rows are neighbours in memory.
template <class Block>
MCP_DEVICE void store_block_stats(const BwdPreprocessParams& params,
                                  const Block& block,
                                  const float (&sums)[kRowsAtOnce]) {
    const int lane = lane_index() % Block::kLanes;
    const i32 row = block.row + lane % kRowsAtOnce;
    if (block.head >= params.num_heads || row >= params.num_rows) return;
    float delta = 0.0f;
    MCP_UNROLL
    for (int i = 0; i < kRowsAtOnce; i++) delta = lane % kRowsAtOnce == i ? sums[i] : delta;
    const i64 lse_at = row * params.lse_row_stride + block.head * params.lse_head_stride;
    const float lse = ptx::load_global<float>(params.lse + lse_at);
    const bool empty = lse == negative_infinity();
    const float dlse =
        params.dlse == nullptr ? 0.0f : ptx::load_global<float>(params.dlse + lse_at);
    for (i32 copy = lane / kRowsAtOnce; copy < kStatCopies; copy += Block::kLanes / kRowsAtOnce) {
        store_stats(params, copy, row, block.head, empty ? positive_infinity() : lse * kLog2E,
                    empty ? 0.0f : delta - dlse);
    }
}

// delta = rowsum(dout * out) - dlse, lse in base 2; see BwdPreprocessParams. `Out` is T or float.
template <class T, class Out, int kValueDim>
MCP_DEVICE void preprocess_blocks(const BwdPreprocessParams& params) {
    using Block = RowBlock<kValueDim>;
    const i64 count = Block::count(params.num_rows, params.num_heads);
    for (i64 index = Block::first(); index < count; index += Block::step()) {
        const Block block(index, params.num_heads);
        RowPart<Out> outs[kRowsAtOnce] = {};
        RowPart<T> douts[kRowsAtOnce] = {};
        MCP_UNROLL
        for (int i = 0; i < kRowsAtOnce; i++) {
            const i64 row = block.row + i;
            if (!block.valid || row >= params.num_rows) continue;
            outs[i].load(params.out, row * params.out_row_stride +
                                         block.head * params.out_head_stride + block.column);
            douts[i].load(params.dout, row * params.dout_row_stride +
                                           block.head * params.dout_head_stride + block.column);
        }
        float sums[kRowsAtOnce];
        MCP_UNROLL
        for (int i = 0; i < kRowsAtOnce; i++) {
            float out[kColumnsAtOnce], dout[kColumnsAtOnce];
            outs[i].unpack(out);
            douts[i].unpack(dout);
            sums[i] = 0.0f;
            MCP_UNROLL
            for (int j = 0; j < kColumnsAtOnce; j++) sums[i] = ptx::fma(out[j], dout[j], sums[i]);
            MCP_UNROLL
            for (int mask = 1; mask < Block::kLanes; mask *= 2) {
                sums[i] += ptx::shuffle_xor(sums[i], mask);
            }
        }
        store_block_stats(params, block, sums);
    }
}

template <class T, int kValueDim>
MCP_DEVICE void preprocess(const BwdPreprocessParams& params) {
    if (params.out_is_float) {
        preprocess_blocks<T, float, kValueDim>(params);
    } else {
        preprocess_blocks<T, T, kValueDim>(params);
    }
}

// dq = softmax_scale * dq_sum, converted.
template <class T, int kHeadDim>
MCP_DEVICE void postprocess(const BwdPostprocessParams& params) {
    using Block = RowBlock<kHeadDim>;
    const i64 count = Block::count(params.num_rows, params.num_heads);
    for (i64 index = Block::first(); index < count; index += Block::step()) {
        const Block block(index, params.num_heads);
        if (!block.valid) continue;
        RowPart<float> sums[kRowsAtOnce] = {};
        MCP_UNROLL
        for (int i = 0; i < kRowsAtOnce; i++) {
            const i64 row = block.row + i;
            if (row >= params.num_rows) continue;
            sums[i].load(params.dq_sum, row * params.sum_row_stride +
                                            block.head * params.sum_head_stride + block.column);
        }
        MCP_UNROLL
        for (int i = 0; i < kRowsAtOnce; i++) {
            const i64 row = block.row + i;
            if (row >= params.num_rows) continue;
            float dq[kColumnsAtOnce];
            sums[i].unpack(dq);
            MCP_UNROLL
            for (int j = 0; j < kColumnsAtOnce; j++) dq[j] *= params.softmax_scale;
            const i64 at =
                row * params.dq_row_stride + block.head * params.dq_head_stride + block.column;
            if (params.dq_is_float) {
                RowPart<float>::store(params.dq, at, dq);
            } else {
                RowPart<T>::store(params.dq, at, dq);
            }
        }
    }
}

}  // namespace mcp::attn
