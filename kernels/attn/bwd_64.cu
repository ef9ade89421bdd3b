// One variant of the kernel for all gradients of head dim 64; variants.json gives the MCP_* values,
// one cubin each.
#include "bwd_64_sm90.cuh"

using Traits = mcp::attn::Bwd64Traits<mcp::MCP_TYPE, MCP_STAGES>;
static_assert(Traits::kHeadDim == MCP_HEAD_DIM && Traits::kValueDim == MCP_VALUE_DIM &&
                  !MCP_SOFTCAP && !MCP_DROPOUT && MCP_ADDS_DQ && Traits::kBlockM == MCP_BLOCK_M &&
                  Traits::kBlockN == MCP_BLOCK_N && Traits::kThreads == MCP_THREADS &&
                  Traits::kSharedBytes == MCP_SHARED_BYTES,
              "variants.json and traits.h disagree");

MCP_KERNEL(MCP_THREADS) mcp_attention_backward(MCP_PARAMS(mcp::attn::BwdParams, params)) {
    mcp::attn::backward_64<Traits>(params);
}
