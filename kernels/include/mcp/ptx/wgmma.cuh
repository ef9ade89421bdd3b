// Warpgroup matrix multiply-accumulate, D[64][N] += A[64][16] B[16][N], fp32 sums.
//
// The 128 threads of a warpgroup call together. Register i of lane l of warp w holds
// D[16w + l/4 + 8*((i>>1)&1)][8*(i>>2) + 2*(l%4) + (i&1)].
// Order: wgmma_pin(accumulators), wgmma_fence, products, wgmma_commit, wgmma_wait, wgmma_pin.
// Nothing touches the accumulators, or registers given as A, between fence and wait. (A pin between
// fence and product makes ptxas serialise every product of the kernel, warning C7520.)
#pragma once

#include <mcp/types.h>

#include <mcp/ptx/keywords.cuh>

namespace mcp::ptx {

// Orders register and shared-memory accesses of the warpgroup before the products that follow.
MCP_DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// The products since the last commit become one group.
MCP_DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `kPending` of the latest groups are incomplete.
template <int kPending>
MCP_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Tells the compiler that the registers change here, so that it moves no access across.
template <int kSize>
MCP_DEVICE void wgmma_pin(float (&d)[kSize]) {
    MCP_UNROLL
    for (int i = 0; i < kSize; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

// clang-format off
// Operand lists of 8 registers each: their C++ side and their numbers in the instruction's text.
#define MCP_R8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define MCP_R16 MCP_R8(0), MCP_R8(8)
#define MCP_R32 MCP_R16, MCP_R8(16), MCP_R8(24)
#define MCP_R40 MCP_R32, MCP_R8(32)
#define MCP_R48 MCP_R40, MCP_R8(40)
#define MCP_R56 MCP_R48, MCP_R8(48)
#define MCP_R64 MCP_R56, MCP_R8(56)
#define MCP_R80 MCP_R64, MCP_R8(64), MCP_R8(72)
#define MCP_R96 MCP_R80, MCP_R8(80), MCP_R8(88)
#define MCP_R128 MCP_R96, MCP_R8(96), MCP_R8(104), MCP_R8(112), MCP_R8(120)
#define MCP_T16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MCP_T32 MCP_T16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MCP_T40 MCP_T32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define MCP_T48 MCP_T40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define MCP_T56 MCP_T48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define MCP_T64 MCP_T56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define MCP_T80 MCP_T64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define MCP_T96 MCP_T80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define MCP_T128 \
    MCP_T96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
            ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// R = N/2 registers are operands 0..R-1; O1.. are the numbers R, R+1, ... of those that follow.
#define MCP_WGMMA_SS(N, R, KIND, O1, O2, O3, O4, O5)                                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O3                                         \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND            \
                 " {" MCP_T##R "}, %" #O1 ", %" #O2 ", p, 1, 1, %" #O4 ", %" #O5 ";\n}\n"         \
                 : MCP_R##R                                                                       \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)), "n"(kTransA), "n"(kTransB))
#define MCP_WGMMA_RS(N, R, KIND, O1, O2, O3, O4, O5, O6, O7)                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O6                                         \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND            \
                 " {" MCP_T##R "}, {%" #O1 ", %" #O2 ", %" #O3 ", %" #O4 "}, %" #O5               \
                 ", p, 1, 1, %" #O7 ";\n}\n"                                                      \
                 : MCP_R##R                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                            \
                   "r"(static_cast<u32>(accumulate)), "n"(kTransB))
#define MCP_SS(N, R, O1, O2, O3, O4, O5)                                                     \
    if constexpr (kN == N) {                                                                 \
        if constexpr (kIsBf16<T>) MCP_WGMMA_SS(N, R, "bf16", O1, O2, O3, O4, O5);            \
        else MCP_WGMMA_SS(N, R, "f16", O1, O2, O3, O4, O5);                                  \
    }
#define MCP_RS(N, R, O1, O2, O3, O4, O5, O6, O7)                                             \
    if constexpr (kN == N) {                                                                 \
        if constexpr (kIsBf16<T>) MCP_WGMMA_RS(N, R, "bf16", O1, O2, O3, O4, O5, O6, O7);    \
        else MCP_WGMMA_RS(N, R, "f16", O1, O2, O3, O4, O5, O6, O7);                          \
    }
// clang-format on

// Operands A and B from shared memory through matrix descriptors; kTrans 0: K-major, 1: MN-major.
// `accumulate` false: D is overwritten.
template <class T, int kN, int kTransA, int kTransB>
MCP_DEVICE void wgmma_ss(float (&d)[kN / 2], u64 a, u64 b, bool accumulate) {
    static_assert(kN == 64 || kN == 80 || kN == 96 || kN == 112 || kN == 128 || kN == 160,
                  "add the shape below");
    MCP_SS(64, 32, 32, 33, 34, 35, 36)
    MCP_SS(80, 40, 40, 41, 42, 43, 44)
    MCP_SS(96, 48, 48, 49, 50, 51, 52)
    MCP_SS(112, 56, 56, 57, 58, 59, 60)
    MCP_SS(128, 64, 64, 65, 66, 67, 68)
    MCP_SS(160, 80, 80, 81, 82, 83, 84)
}

// Operand A from four registers a[0..3] of packed pairs, which stay untouched until the wait.
template <class T, int kN, int kTransB>
MCP_DEVICE void wgmma_rs(float (&d)[kN / 2], const u32* a, u64 b, bool accumulate) {
    static_assert(kN == 64 || kN == 96 || kN == 128 || kN == 192 || kN == 256,
                  "add the shape below");
    MCP_RS(64, 32, 32, 33, 34, 35, 36, 37, 38)
    MCP_RS(96, 48, 48, 49, 50, 51, 52, 53, 54)
    MCP_RS(128, 64, 64, 65, 66, 67, 68, 69, 70)
    MCP_RS(192, 96, 96, 97, 98, 99, 100, 101, 102)
    MCP_RS(256, 128, 128, 129, 130, 131, 132, 133, 134)
}

}  // namespace mcp::ptx
