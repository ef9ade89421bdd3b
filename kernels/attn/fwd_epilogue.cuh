// Between the accumulator of one consumer and `out` and `lse` in global memory.
//
// Results go by way of shared memory, so that a warp writes whole rows of 128 bytes:
//     fragment   lane l: rows l / 4, l / 4 + 8     -> room of the warp, 16 rows of 128 bytes,
//     swizzled store      lane l: rows l / 8 + 4 j, chunk l % 8 of 16 bytes
//
// An earlier result over other keys is where the online softmax starts from: a key with the logit
// lse and the value out. Its rows are read while the first scores are computed.
#pragma once

#include <mcp/fragment.cuh>
#include <mcp/panels.cuh>

#include "params.h"
#include "softmax.cuh"
#include "tile_iter.cuh"

namespace mcp::attn {

// Of the thread's two rows, place.row and place.row + 8: where they are, if they belong to the
// tile.
struct RowPlace {
    i32 row;
    bool valid;

    MCP_DEVICE RowPlace(const WorkItem& work, FragmentPlace place, int half)
        : row(place.row + 8 * half), valid(row < work.row0 + work.rows) {}
    MCP_DEVICE float* lse(const FwdParams& params, const WorkItem& work) const {
        return params.lse + row * params.lse_row_stride + work.head * params.lse_head_stride;
    }
    MCP_DEVICE i64 out_offset(const FwdParams& params, const WorkItem& work) const {
        return row * params.out_row_stride + work.head * params.out_head_stride;
    }
};

// Nothing, or the earlier result. `out` must not be used before `begin_output`.
template <int kSize>
MCP_DEVICE void load_earlier(const FwdParams& params,
                             const WorkItem& work,
                             FragmentPlace place,
                             float (&out)[kSize],
                             OnlineSoftmax& softmax) {
    softmax.reset();
    fill(out, 0.0f);
    if (params.earlier == nullptr) return;
    MCP_UNROLL
    for (int half = 0; half < 2; half++) {
        const RowPlace at(work, place, half);
        if (!at.valid) continue;
        softmax.start(half, ptx::load_global<float>(at.lse(params, work)), params.score_per_lse,
                      place.column == 0);
        const float* earlier = params.earlier + at.out_offset(params, work) + place.column;
        MCP_UNROLL
        for (int i = 0; i < kSize / 4; i++) {
            const f32x2 pair = ptx::load_global<f32x2>(earlier + 8 * i);
            out[4 * i + 2 * half] = pair.x;
            out[4 * i + 2 * half + 1] = pair.y;
        }
    }
}

// Brings the earlier output to the first maximum. Of a row without one, memory may hold anything.
template <int kSize>
MCP_DEVICE void begin_output(float (&out)[kSize],
                             const OnlineSoftmax& softmax,
                             const float (&rescale)[2]) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) {
        const int half = i / 2 % 2;
        out[i] = softmax.has_start(half) ? out[i] * rescale[half] : 0.0f;
    }
}

// Stores `lse`, and gives the factors of the thread's two rows. All lanes of a row call together.
MCP_DEVICE void finish_rows(const FwdParams& params,
                            const WorkItem& work,
                            FragmentPlace place,
                            const OnlineSoftmax& softmax,
                            float (&factor)[2]) {
    const float sink = params.sink == nullptr ? negative_infinity()
                                              : ptx::load_constant_f32(params.sink + work.head);
    MCP_UNROLL
    for (int half = 0; half < 2; half++) {
        const RowPlace at(work, place, half);
        const float sum = row_sum(softmax.sum[half]);
        const RowEnd end = finish_row(softmax.max[half], sum, params.score_scale, sink);
        factor[half] = end.factor;
        // A row that nothing was added to keeps its bits.
        if (place.column == 0 && at.valid && !softmax.is_as_started(half, sum, sink)) {
            ptx::store_global<float>(at.lse(params, work), end.lse);
        }
    }
}

// Raises the largest logit of the head to those of the tile's rows: the maximum of a row that did
// not start from an earlier result is its largest score. All lanes of a warp call together.
MCP_DEVICE void raise_max_logit(const FwdParams& params,
                                const WorkItem& work,
                                FragmentPlace place,
                                const OnlineSoftmax& softmax) {
    float top = negative_infinity();
    MCP_UNROLL
    for (int half = 0; half < 2; half++) {
        if (RowPlace(work, place, half).valid) top = ptx::max(top, softmax.max[half]);
    }
    // The four lanes of a row know the same.
    MCP_UNROLL
    for (int other = 4; other < kWarpSize; other *= 2) {
        top = ptx::max(top, ptx::shuffle_xor(top, other));
    }
    if (lane_index() == 0 && top != negative_infinity()) {
        ptx::atomic_max(params.max_logits + work.head, top * (params.score_scale * kLn2));
    }
}

// The rows of `out` that a lane stores, 4 apart, in panels of 128 bytes.
struct OutRows {
    static constexpr int kRows = 4;
    u8* row0;   // of the first, at the lane's 16 bytes of a panel
    i64 step;   // bytes from one to the next
    i32 num;    // how many of them belong to the tile
    u32 room;   // of the warp
    u32 chunk;  // the lane's 16 bytes of its first row in the room

    // `warp_row`: absolute row of the warp's first.
    MCP_DEVICE OutRows(const FwdParams& params, const WorkItem& work, i32 warp_row, u32 room)
        : room(room) {
        const int lane = lane_index();
        const i32 first = warp_row + lane / 8;
        const i64 element_bytes = params.out_is_float ? 4 : 2;
        row0 =
            static_cast<u8*>(params.out) +
            element_bytes * (first * params.out_row_stride + work.head * params.out_head_stride) +
            lane % 8 * 16;
        step = element_bytes * 4 * params.out_row_stride;
        num = (work.row0 + work.rows - first + 3) / 4;
        chunk = room + lane / 8 * kRowBytes + ((lane % 8 ^ lane / 8) * 16);
    }
    // Copies a panel from the room to memory; the last may have fewer than 128 bytes.
    MCP_DEVICE void copy(int panel, bool has_column) const {
        ptx::sync_warp();  // the room is filled
        MCP_UNROLL
        for (int j = 0; j < kRows; j++) {
            // Four rows on, bit 2 of the row is the other: so is that of the chunk.
            const i32x4 bytes =
                ptx::load_shared_i32x4((chunk + j * 4 * kRowBytes) ^ (j % 2 ? 64u : 0u));
            if (j < num && has_column) {
                ptx::store_global<i32x4>(row0 + j * step + panel * kRowBytes, bytes);
            }
        }
        ptx::sync_warp();  // the room may be filled again
    }
};

// Stores a warp's 16 rows, scaled: panels of 64 columns in 16 bits, of 32 in fp32.
template <class T, int kSize>
MCP_DEVICE void store_16(const float (&out)[kSize], const float (&factor)[2], const OutRows& rows) {
    const int lane = lane_index();
    const u32 row = rows.room + lane % 16 * kRowBytes;  // matrices: rows 0, 8, and 0, 8 again
    MCP_UNROLL
    for (int panel = 0; panel < (kSize + 31) / 32; panel++) {
        MCP_UNROLL
        for (int k = 0; k < 4 && panel * 32 + k * 8 < kSize; k++) {
            const float* x = out + panel * 32 + k * 8;
            u32 packed[4];
            MCP_UNROLL
            for (int m = 0; m < 4; m++) {
                packed[m] = ptx::pack2<T>(x[2 * m] * factor[m % 2], x[2 * m + 1] * factor[m % 2]);
            }
            ptx::stmatrix_x4(row + ((2 * k + lane / 16) ^ (lane % 8)) * 16, packed[0], packed[1],
                             packed[2], packed[3]);
        }
        rows.copy(panel, panel * 64 + lane % 8 * 8 < 2 * kSize);
    }
}
template <int kSize>
MCP_DEVICE void store_f32(const float (&out)[kSize],
                          const float (&factor)[2],
                          const OutRows& rows) {
    const int lane = lane_index();
    MCP_UNROLL
    for (int panel = 0; panel < kSize / 16; panel++) {
        float part[16];
        MCP_UNROLL
        for (int i = 0; i < 16; i++) part[i] = out[panel * 16 + i] * factor[i / 2 % 2];
        store_f32_panels(rows.room, 16, lane / 4, 2 * (lane % 4), part);
        rows.copy(panel, true);
    }
}

}  // namespace mcp::attn
