// Softcap: x = cap * tanh(y) with y = softmax_scale * s / softcap, from r = 1 / (1 + e^2y):
//     tanh(y) = 1 - 2 r      1 - tanh(y)^2 = 4 r (1 - r)
// Absolute error of x: cap * 2^-21, where tanh.approx would leave cap * 2^-11.
#pragma once

#include <mcp/fragment.cuh>

namespace mcp::attn {

// A thread's scores in groups of four of one row: columns 0, 1, 8, 9, the same of the second row,
// columns 16, 17, 24, 25 ... Register `i` of a group.
constexpr int kCapGroup = 4;
MCP_DEVICE constexpr int cap_register(int group, int i) {
    return group / 2 * 8 + group % 2 * 2 + i / 2 * 4 + i % 2;
}

// r of the scores of a group; cap_scale as in FwdParams. kTogether: one reciprocal, of the product
// of the four denominators, gives all, as capped loops wait for the unit that makes exponentials
// and reciprocals. A NaN reaches the whole group then. The product stays finite, as e^2y is cut at
// 2^30, where 1 - 2 r is 1.
template <bool kTogether, int kSize>
MCP_DEVICE void cap_reciprocals(float (&r)[kCapGroup],
                                const float (&scores)[kSize],
                                int group,
                                float cap_scale) {
    static_assert(kSize % 8 == 0, "groups are of four columns and two rows");
    float x[kCapGroup];
    MCP_UNROLL
    for (int i = 0; i < kCapGroup; i++) {
        const float power = scores[cap_register(group, i)] * cap_scale;
        x[i] = 1.0f + ptx::exp2_approx(kTogether ? ptx::min_or_nan(power, 30.0f) : power);
    }
    if constexpr (kTogether) {
        const float left = x[0] * x[1], right = x[2] * x[3];
        const float all = ptx::rcp_approx(left * right);
        const float of_left = all * right, of_right = all * left;
        r[0] = of_left * x[1], r[1] = of_left * x[0];
        r[2] = of_right * x[3], r[3] = of_right * x[2];
    } else {
        MCP_UNROLL
        for (int i = 0; i < kCapGroup; i++) r[i] = ptx::rcp_approx(x[i]);
    }
}

}  // namespace mcp::attn
