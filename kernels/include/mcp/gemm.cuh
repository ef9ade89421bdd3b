// Products of a warpgroup, issued and committed as one group; the caller waits (ptx::wgmma_wait)
// and pins.
#pragma once

#include <mcp/panels.cuh>

namespace mcp {

// d [64, N] = A B' for the 64 rows of A that start at `a_row` and the N = 2 * kSize rows of B that
// start at `b_row`; both with the reduction along their columns.
template <class T, class TileA, class TileB, int kSize>
MCP_DEVICE void issue_a_bt(float (&d)[kSize], TileA a, int a_row, TileB b, int b_row = 0) {
    static_assert(2 * kSize <= TileB::kRows && TileA::kColumns == TileB::kColumns, "shapes differ");
    const u64 a_start = k_major_descriptor(uniform(a.address + a_row * kRowBytes));
    const u64 b_start = k_major_descriptor(uniform(b.address + b_row * kRowBytes));
    ptx::wgmma_fence();
    MCP_UNROLL
    for (int k = 0; k < TileA::kColumns / 16; k++) {
        ptx::wgmma_ss<T, 2 * kSize, 0, 0>(d, step_descriptor(a_start, k_major_step<TileA>(k)),
                                          step_descriptor(b_start, k_major_step<TileB>(k)), k != 0);
    }
    ptx::wgmma_commit();
}

// d [64, columns of d] += P B (without kAdds: =) for the columns of B that start at panel
// `b_panel`, with P [64, B rows] in registers as packed pairs of an accumulator of issue_a_bt.
template <class T, bool kAdds = true, class TileB, int kSize, int kPacked>
MCP_DEVICE void issue_p_b(float (&d)[kSize], const u32 (&p)[kPacked], TileB b, int b_panel = 0) {
    static_assert(2 * kSize <= TileB::kColumns && kPacked == TileB::kRows / 4, "shapes differ");
    const u64 b_start =
        mn_major_descriptor(TileB{uniform(b.address + b_panel * TileB::kPanelBytes)});
    if constexpr (kAdds) ptx::wgmma_pin(d);
    ptx::wgmma_fence();
    MCP_UNROLL
    for (int k = 0; k < TileB::kRows / 16; k++) {
        ptx::wgmma_rs<T, 2 * kSize, 1>(d, p + 4 * k, step_descriptor(b_start, k * kMnMajorStep),
                                       kAdds || k != 0);
    }
    ptx::wgmma_commit();
}

// d [64, columns of d] = A B for the first 64 rows of A and the columns of B that start at panel
// `b_panel`; the reduction runs along A's columns and B's rows.
template <class T, class TileA, class TileB, int kSize>
MCP_DEVICE void issue_a_b(float (&d)[kSize], TileA a, TileB b, int b_panel) {
    static_assert(TileA::kColumns == TileB::kRows, "shapes differ");
    const u64 a_start = k_major_descriptor(uniform(a.address));
    const u64 b_start =
        mn_major_descriptor(TileB{uniform(b.address + b_panel * TileB::kPanelBytes)});
    ptx::wgmma_fence();
    MCP_UNROLL
    for (int k = 0; k < TileA::kColumns / 16; k++) {
        ptx::wgmma_ss<T, 2 * kSize, 0, 1>(d, step_descriptor(a_start, k_major_step<TileA>(k)),
                                          step_descriptor(b_start, k * kMnMajorStep), k != 0);
    }
    ptx::wgmma_commit();
}

// d [64, rows of B] += A' B' for panel `a_panel` of A, 64 columns; the reduction runs along the
// rows of A and the columns of B.
template <class T, class TileA, class TileB, int kSize>
MCP_DEVICE void issue_at_bt(float (&d)[kSize], TileA a, int a_panel, TileB b) {
    static_assert(2 * kSize == TileB::kRows && TileA::kRows == TileB::kColumns, "shapes differ");
    const u64 a_start =
        mn_major_descriptor(TileA{uniform(a.address + a_panel * TileA::kPanelBytes)});
    const u64 b_start = k_major_descriptor(uniform(b.address));
    ptx::wgmma_pin(d);
    ptx::wgmma_fence();
    MCP_UNROLL
    for (int k = 0; k < TileA::kRows / 16; k++) {
        ptx::wgmma_ss<T, 2 * kSize, 1, 0>(d, step_descriptor(a_start, k * kMnMajorStep),
                                          step_descriptor(b_start, k_major_step<TileB>(k)), true);
    }
    ptx::wgmma_commit();
}

// d [64, columns of d] = A' B for A of 64 columns and the first columns of B; the reduction runs
// along the rows of both.
template <class T, class TileA, class TileB, int kSize>
MCP_DEVICE void issue_at_b(float (&d)[kSize], TileA a, TileB b) {
    static_assert(TileA::kColumns == 64 && TileA::kRows == TileB::kRows, "shapes differ");
    const u64 a_start = mn_major_descriptor(TileA{uniform(a.address)});
    const u64 b_start = mn_major_descriptor(TileB{uniform(b.address)});
    ptx::wgmma_fence();
    MCP_UNROLL
    for (int k = 0; k < TileA::kRows / 16; k++) {
        ptx::wgmma_ss<T, 2 * kSize, 1, 1>(d, step_descriptor(a_start, k * kMnMajorStep),
                                          step_descriptor(b_start, k * kMnMajorStep), k != 0);
    }
    ptx::wgmma_commit();
}

}  // namespace mcp
