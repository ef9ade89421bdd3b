// The kernel that adds rows to rows; it serves every width.
#include "add.cuh"

static_assert(mcp::rows::kThreads == MCP_THREADS && mcp::rows::kAdded == MCP_COLUMNS,
              "variants.json disagrees with joins.cuh or add.cuh");

MCP_KERNEL(MCP_THREADS)
mcp_add_rows(MCP_PARAMS(mcp::rows::AddRowsParams, params)) {
    mcp::rows::add_rows(params);
}
