// One variant of the kernel for dk and dv of head dims above 128; variants.json gives the MCP_*
// values, one cubin each.
#include "bwd_wide_sm90.cuh"

using Traits =
    mcp::attn::BwdWideTraits<mcp::MCP_TYPE, MCP_HEAD_DIM, MCP_VALUE_DIM, MCP_STAGES, MCP_SOFTCAP>;
static_assert(Traits::kBlockM == MCP_BLOCK_M && Traits::kBlockN == MCP_BLOCK_N &&
                  Traits::kThreads == MCP_THREADS && Traits::kSharedBytes == MCP_SHARED_BYTES,
              "variants.json and traits.h disagree");

MCP_KERNEL(MCP_THREADS) mcp_attention_backward(MCP_PARAMS(mcp::attn::BwdParams, params)) {
    mcp::attn::backward_wide<Traits>(params);
}
