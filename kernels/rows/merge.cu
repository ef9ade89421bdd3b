// The kernel that merges rows of partial results; it serves every head dim.
#include "merge.cuh"

static_assert(mcp::rows::kThreads == MCP_THREADS, "variants.json and joins.cuh disagree");

MCP_KERNEL(MCP_THREADS)
mcp_merge_rows(MCP_PARAMS(mcp::rows::MergeRowsParams, params)) {
    mcp::rows::merge_rows(params);
}
