// One variant of the kernel after the backward kernel: MCP_TYPE, MCP_HEAD_DIM.
#include "bwd_rows.cuh"

static_assert(mcp::attn::kRowThreads == MCP_THREADS, "variants.json and bwd_rows.cuh disagree");

MCP_KERNEL(MCP_THREADS)
mcp_attention_backward_postprocess(MCP_PARAMS(mcp::attn::BwdPostprocessParams, params)) {
    mcp::attn::postprocess<mcp::MCP_TYPE, MCP_HEAD_DIM>(params);
}
