// One variant of the kernel before the backward kernel: MCP_TYPE, MCP_VALUE_DIM.
#include "bwd_rows.cuh"

static_assert(mcp::attn::kRowThreads == MCP_THREADS, "variants.json and bwd_rows.cuh disagree");

MCP_KERNEL(MCP_THREADS)
mcp_attention_backward_preprocess(MCP_PARAMS(mcp::attn::BwdPreprocessParams, params)) {
    mcp::attn::preprocess<mcp::MCP_TYPE, MCP_VALUE_DIM>(params);
}
