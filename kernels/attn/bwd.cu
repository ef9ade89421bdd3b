// One variant of the backward kernel; variants.json gives the MCP_* values, one cubin each.
#include "bwd_sm90.cuh"

using Traits = mcp::attn::BwdTraits<mcp::MCP_TYPE,
                                    MCP_HEAD_DIM,
                                    MCP_VALUE_DIM,
                                    MCP_BLOCK_M,
                                    MCP_STAGES,
                                    MCP_SOFTCAP,
                                    MCP_DROPOUT,
                                    MCP_ADDS_DQ>;
static_assert(Traits::kBlockN == MCP_BLOCK_N && Traits::kThreads == MCP_THREADS &&
                  Traits::kSharedBytes == MCP_SHARED_BYTES,
              "variants.json and traits.h disagree");

MCP_KERNEL(MCP_THREADS) mcp_attention_backward(MCP_PARAMS(mcp::attn::BwdParams, params)) {
    mcp::attn::backward<Traits>(params);
}
