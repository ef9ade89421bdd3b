// One variant of the forward kernel; variants.json gives the MCP_* values, one cubin each.
#include "fwd_sm90.cuh"

using Traits = mcp::attn::FwdTraits<mcp::MCP_TYPE,
                                    MCP_HEAD_DIM,
                                    MCP_VALUE_DIM,
                                    MCP_BLOCK_N,
                                    MCP_STAGES,
                                    MCP_CONSUMERS,
                                    MCP_SOFTCAP,
                                    MCP_DROPOUT>;
static_assert(Traits::kBlockM == MCP_BLOCK_M && Traits::kThreads == MCP_THREADS &&
                  Traits::kSharedBytes == MCP_SHARED_BYTES,
              "variants.json and traits.h disagree");

MCP_KERNEL(MCP_THREADS) mcp_attention_forward(MCP_PARAMS(mcp::attn::FwdParams, params)) {
    mcp::attn::forward<Traits>(params);
}
