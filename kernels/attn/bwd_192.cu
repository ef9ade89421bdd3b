// One variant of the kernel for all gradients of head dims 192 and 256; variants.json gives the
// MCP_* values, one cubin each.
#include "bwd_192_sm90.cuh"

using Traits = mcp::attn::Bwd192Traits<mcp::MCP_TYPE, MCP_HEAD_DIM, MCP_VALUE_DIM, MCP_STAGES>;
static_assert(!MCP_SOFTCAP && MCP_ADDS_DQ && Traits::kBlockM == MCP_BLOCK_M &&
                  Traits::kBlockN == MCP_BLOCK_N && Traits::kThreads == MCP_THREADS &&
                  Traits::kSharedBytes == MCP_SHARED_BYTES,
              "variants.json and traits.h disagree");

MCP_KERNEL(MCP_THREADS) mcp_attention_backward(MCP_PARAMS(mcp::attn::BwdParams, params)) {
    mcp::attn::backward_192<Traits>(params);
}
