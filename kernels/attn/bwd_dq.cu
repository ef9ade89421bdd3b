// One variant of the kernel for dq alone; variants.json gives the MCP_* values, one cubin each.
#include "bwd_dq_sm90.cuh"

using Traits = mcp::attn::DqTraits<mcp::MCP_TYPE,
                                   MCP_HEAD_DIM,
                                   MCP_VALUE_DIM,
                                   MCP_BLOCK_N,
                                   MCP_STAGES,
                                   MCP_VALUE_STAGES,
                                   MCP_SOFTCAP,
                                   MCP_DROPOUT>;
static_assert(Traits::kBlockM == MCP_BLOCK_M && Traits::kThreads == MCP_THREADS &&
                  Traits::kSharedBytes == MCP_SHARED_BYTES,
              "variants.json and traits.h disagree");

MCP_KERNEL(MCP_THREADS) mcp_attention_backward_dq(MCP_PARAMS(mcp::attn::DqParams, params)) {
    mcp::attn::backward_dq<Traits>(params);
}
