// Parameters of the attention kernels: one plain struct per kernel, the same bytes on the device,
// in the emulator and in the launcher's mirror. Strides count elements. T tokens, S key tokens, N
// query heads, G kv heads, H head dim, Hv value head dim.
#pragma once

#include <mcp/types.h>

namespace mcp::attn {

// Query rows [row0, row0 + rows) of one work item, rows <= block_m, and their key segments.
// Forward: every query row is in exactly one tile; tiles without segments write out = 0, lse =
// -inf.
struct alignas(16) Tile {
    i32 row0, rows, seg0, num_segs;
};

// Row r (absolute, q0 <= r < q1) sees keys [max(k0, r + lo), min(k1, r + hi + 1)). Key tiles start
// at k0 + j * block_n; those with full_begin <= j < full_end need no mask for any row of the tile.
// k0 < k1. Open sides: -2^29, 2^29.
struct alignas(16) Segment {
    i32 k0, k1, lo, hi;
    i32 q0, q1, full_begin, full_end;
};

// Dropout of probabilities, in the variants that have it: words of query rows [N, padded_rows] and
// of key rows, a tile more of both than there are rows, and what their hash is compared with
// (dropout.cuh). What is kept is multiplied by `scale`.
struct DropoutParams {
    const i32* row_words;
    const i32* key_words;
    i32 padded_rows, threshold;
    float scale;
};

// out = softmax(scale * q k' + mask) v per query head n, which uses kv head n / (num_heads /
// num_kv_heads).
struct FwdParams {
    // 3-D maps over {H, heads, tokens}, 16-bit, 128-byte swizzle, boxes {64, 1, rows}; rows =
    // block_m for q, block_n for k and v. Columns past H are filled with zeros.
    TensorMap q_map, k_map, v_map;

    const Tile* tiles;  // [num_tiles]
    const Segment* segments;
    const i32* order;  // [num_tiles] the tiles, longest first
    i32* counters;  // [2] zero before the first launch; the kernel leaves them zero. One pair per
                    // stream
    void* out;      // [T, N, Hv] float, or the inputs' type; address, strides multiples of 16 bytes
    float* lse;     // [T, N] natural log of the softmax denominator, sink included
    const float* sink;  // [N] logits that join the denominator without a value, or null
    float* max_logits;  // [N] raised to the largest scaled and capped logit of each head, or null;
                        // not with earlier, whose rows start from lse instead of a logit
    const float* earlier;  // [T, N, Hv] with the strides of out, or null: with what lse holds, a
                           // partial result over other keys, onto which this one is merged. May be
                           // out itself: then rows without keys here need no tile

    i64 out_row_stride, out_head_stride;
    i64 lse_row_stride, lse_head_stride;

    i32 num_tiles, num_heads, num_kv_heads;
    i32 heads_per_section;  // heads whose tiles are interleaved, longest first, before the next
                            // heads begin
    i32 num_keys;           // rows of k and v

    // Not capped (softcap == 0): score_scale = softmax_scale * log2(e). Capped: score_scale = 1,
    // cap = softcap * log2(e), cap_scale = 2 * log2(e) * softmax_scale / softcap. softmax_scale
    // must be > 0; give 1e-30 for 0.
    float score_scale, cap, cap_scale;

    i32 out_is_float;     // otherwise out has the inputs' type
    float score_per_lse;  // the score whose exponential is that of an lse: log2(e) / score_scale,
                          // rounded once. A quotient of the device would be an approximation that
                          // moves lse the same way at every stage
    DropoutParams dropout;
};

// The copy engine starts a box at multiples of 16 bytes only (anything else was an illegal
// instruction on an H100), and query tiles start at any row: row statistics are kept once for each
// row modulo 4. Copy c holds row r at r - c, and zeros behind its last row.
constexpr int kStatCopies = 4;

// What the backward kernel reads beside the tensors: delta = rowsum(dout * out) - dlse, and lse in
// base 2. Rows without keys get lse = +inf (their probabilities become 0) and delta = 0. `out` and
// `lse` are those of the whole row, merged over all stages.
struct BwdPreprocessParams {
    const void* out;    // [T, N, Hv] float, or the inputs' type
    const void* dout;   // [T, N, Hv] the inputs' type
    const float* lse;   // [T, N] natural log
    const float* dlse;  // [T, N] gradient of lse, with the strides of lse, or null
    float* lse_2;       // [kStatCopies, N, padded_rows] lse * log2(e)
    float* delta;       // [kStatCopies, N, padded_rows]

    i64 out_row_stride, out_head_stride;
    i64 dout_row_stride, dout_head_stride;
    i64 lse_row_stride, lse_head_stride;

    i32 num_rows, padded_rows;  // padded_rows: T rounded up to a multiple of 4, for the tensor map
    i32 num_heads;
    i32 out_is_float;
};

enum GradientStore : i32 {
    kStore16Bits,  // dk and dv have the inputs' type
    kStoreFloats,
    kAddFloats,  // dk and dv are float sums
};

// With p = exp2(s * score_scale - lse_2), dp = dout v', ds = p * (dp - delta):
//     dv += p' dout     dk += softmax_scale * ds' q     dq += ds k
// (dq is not scaled: the postprocess does that once. Kernels of dk and dv alone leave it to
// DqParams.)
// A tile is block_n keys, a segment a range of queries; in Tile and Segment rows are keys and keys
// are queries.
struct BwdParams {
    TensorMap q_map, dout_map;  // as in FwdParams, boxes {64, 1, block_m}
    TensorMap k_map, v_map;     // boxes {64, 1, block_n}
    // float over {T, N, kStatCopies} with padded_rows floats per head, boxes {block_m, 1, 1}, no
    // swizzle
    TensorMap lse_map, delta_map;
    // float over {H, N, T}, boxes {32, 1, block_m}, 128-byte swizzle; unused by kernels of dk and
    // dv alone
    TensorMap dq_map;

    const Tile* tiles;
    const Segment* segments;
    const i32* order;
    i32* counters;  // [2] as in FwdParams
    void* dk;       // [S, G, H] float, or the inputs' type
    void* dv;       // [S, G, Hv]

    i64 dk_row_stride, dk_head_stride;
    i64 dv_row_stride, dv_head_stride;

    i32 num_tiles, num_heads, num_kv_heads;
    i32 heads_per_section;  // of work, as in FwdParams
    // Query heads that a work item visits, and how many items share a kv head.
    i32 heads_per_item, items_per_group;
    i32 num_queries;                    // rows of q and dout
    float score_scale, cap, cap_scale;  // as in FwdParams
    float softmax_scale;
    GradientStore store;  // where items share a kv head, they add
    DropoutParams dropout;
};

// dq = factor * sum of ds k, from query tiles: as BwdParams, with lists as in FwdParams.
struct DqParams {
    TensorMap q_map, dout_map;  // boxes {64, 1, block_m}
    TensorMap k_map, v_map;     // boxes {64, 1, block_n}

    const Tile* tiles;
    const Segment* segments;
    const i32* order;
    i32* counters;       // [2] as in FwdParams
    const float* lse_2;  // [N, padded_rows] the first copy of each
    const float* delta;
    void* dq;  // [T, N, H] float, or the inputs' type

    i64 dq_row_stride, dq_head_stride;

    i32 num_tiles, num_heads, num_kv_heads;
    i32 heads_per_section;  // as in FwdParams
    i32 num_keys, padded_rows;
    float score_scale, cap, cap_scale;  // as in FwdParams
    float factor;
    i32 dq_is_float;
    i32 accumulate;  // dq, float, receives the sum of what it holds and this
    DropoutParams dropout;
};

// dq = softmax_scale * dq_sum, converted.
struct BwdPostprocessParams {
    const float* dq_sum;  // [T, N, H]
    void* dq;             // [T, N, H] float (may be dq_sum itself), or the inputs' type
    i64 sum_row_stride, sum_head_stride;
    i64 dq_row_stride, dq_head_stride;
    i32 num_rows, num_heads;
    float softmax_scale;
    i32 dq_is_float;
};

static_assert(sizeof(Tile) == 16 && sizeof(Segment) == 32, "the host writes these as int32 arrays");

}  // namespace mcp::attn
