// How a consumer of either backward kernel goes through its work: item by item; for each query head
// of the item, the query tiles that see its keys (`visit_tiles`); then its gradients to memory.
#pragma once

#include <mcp/fragment.cuh>
#include <mcp/mailbox.cuh>

#include "params.h"
#include "tile_iter.cuh"

namespace mcp::attn {

// The walk of a consumer that masks.
template <class Consumer>
MCP_DEVICE void visit_queries(Consumer& consumer, const WorkItem& work, FragmentPlace place) {
    const BwdParams& params = consumer.params;
    MCP_NO_UNROLL
    for (i32 head = 0; head < params.heads_per_item; head++) {
        consumer.enter_head(first_query_head_of(params, work) + head);
        typename Consumer::Queries queries(params.segments, work);
        bool more = true;
        MCP_NO_UNROLL
        while (more) {
            const i32 num_full = queries.num_full();
            if (num_full > 0) {
                MCP_NO_UNROLL
                for (i32 left = num_full; left > 0; left--) {
                    consumer.template visit<false>(
                        queries, place,
                        queries.first() + (num_full - left) * Consumer::kQueriesOfTile);
                }
                more = queries.advance(num_full);
            } else {
                consumer.template visit<true>(queries, place, queries.first());
                more = queries.advance();
            }
        }
    }
}

// How many query tiles a work item visits: what a consumer needs to know that does not mask.
template <int kBlockM>
MCP_DEVICE i32 num_visits(const BwdParams& params, const WorkItem& work) {
    i32 num_tiles = 0;
    MCP_NO_UNROLL
    for (i32 s = work.seg0; s < work.seg0 + work.num_segs; s++) {
        const i32x4 queries = ptx::load_constant_i32x4(params.segments + s);
        num_tiles += (queries.y - queries.x + kBlockM - 1) / kBlockM;
    }
    return uniform(num_tiles) * params.heads_per_item;
}

template <class Consumer>
MCP_DEVICE void release_keys(Consumer& consumer) {
    if (thread_in_warpgroup() == 0) consumer.shared.key_ring.release(consumer.keys_at);
    consumer.keys_at.advance();
}

template <class Consumer>
MCP_DEVICE void consume(Consumer& consumer) {
    const auto& shared = consumer.shared;
    for (;;) {
        const WorkItem work =
            to_work_item(receive<2>(shared.mailbox(), shared.mail_ring, consumer.mail_at));
        if (work.head < 0) break;
        const FragmentPlace place = consumer.place_of(work);
        consumer.begin();
        if (work.num_segs > 0) consumer.visit_tiles(work, place);
        consumer.template store<0>(work, place);
        consumer.template store<1>(work, place);
    }
}

}  // namespace mcp::attn
