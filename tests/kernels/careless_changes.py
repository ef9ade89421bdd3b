"""What careless changes of the kernels could look like: (file, text, replacement, what the emulator says)."""

FORWARD = {
    "no fence before the scores": (
        "include/mcp/gemm.cuh",
        "ptx::wgmma_fence();",
        "",
        "no wgmma.fence|changed after the last wgmma.fence",
    ),
    "a cleared tail without proxy fence": (
        "attn/key_producer.cuh",
        "ptx::fence_proxy_async();\n            ptx::sync_warp();",
        "ptx::sync_warp();",
        "through the generic proxy",
    ),
    "a tail released before all lanes have cleared it": (
        "attn/key_producer.cuh",
        "ptx::fence_proxy_async();\n            ptx::sync_warp();",
        "ptx::fence_proxy_async();",
        r"was written by thread \d+, and nothing orders that write before",
    ),
    "waits for the other parity": (
        "include/mcp/ring.cuh",
        "wait(empty(at), at.parity ^ 1)",
        "wait(empty(at), at.parity)",
        "deadlock",
    ),
    "no wait for the keys": (
        "attn/fwd_sm90.cuh",
        "shared.key_ring.wait_full(keys_at);\n        turns.take();",
        "turns.take();",
        "TMA copy that this thread has not waited for|nobody has written",
    ),
    "reads the scores too early": (
        "attn/fwd_sm90.cuh",
        "ptx::wgmma_wait<1>();",
        "ptx::wgmma_wait<2>();",
        "was written between|accumulator read before|in flight",
    ),
    "packs probabilities before the wait": (
        "attn/fwd_sm90.cuh",
        "keys_at.advance();\n        ptx::wgmma_wait<0>();\n        ptx::wgmma_pin(out);",
        "keys_at.advance();\n        pack<T>(probs, scores);\n        ptx::wgmma_wait<0>();\n"
        "        ptx::wgmma_pin(out);",
        "operand A registers of lane 0 changed",
    ),
    "releases the values before the wait": (
        "attn/fwd_sm90.cuh",
        "ptx::wgmma_wait<0>();\n        ptx::wgmma_pin(out);\n"
        "        if (speaker) shared.value_ring.release(values_at);",
        "if (speaker) shared.value_ring.release(values_at);\n        ptx::wgmma_wait<0>();",
        "which a wgmma of warpgroup . may still read",
    ),
    "expects the bytes of the keys for the queries": (
        "attn/fwd_sm90.cuh",
        "expect_tx(full, Traits::kQueryBytes)",
        "expect_tx(full, Traits::kQueryBytes / 2)",
        "fewer bytes were expected than copied|bytes more than expected",
    ),
    "an unaligned base": (
        "attn/fwd_sm90.cuh",
        "(ptx::dynamic_shared() + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes",
        "(ptx::dynamic_shared() + 127) / 128 * 128 + 128",
        "misaligned swizzled panel",
    ),
    "rows past the tile stored": (
        "attn/fwd_epilogue.cuh",
        "if (j < num && has_column)",
        "if (has_column)",
        # Behind `out` lies what the allocator has put there.
        r"stores \w+ \+ \d+, which thread \d+ of block . stores, too"
        r"|lies in no buffer of the launch|which the launch only reads",
    ),
    "one register too many": (
        "attn/traits.h",
        "kConsumers == 2 ? 24 : 32",
        "kConsumers == 2 ? 24 : 40",
        "deadlock.*setmaxnreg.inc 160",
    ),
}
BACKWARD = {
    "consumers that do not meet before dq": (
        "attn/bwd_sm90.cuh",
        "ptx::named_barrier_sync<Shared::kConsumerThreads>(1);",
        "",
        r"was written by thread \d+, and nothing orders|nobody has written|through the generic proxy",
    ),
    "ds without proxy fence": (
        "attn/bwd_sm90.cuh",
        "ptx::fence_proxy_async();\n            ptx::named_barrier_sync",
        "ptx::named_barrier_sync",
        "through the generic proxy",
    ),
    "queries released before dk is done": (
        "attn/bwd_sm90.cuh",
        "ptx::wgmma_wait<0>();\n            ptx::wgmma_pin(dk);\n            release(shared.query_ring);",
        "release(shared.query_ring);\n            ptx::wgmma_wait<0>();",
        "which a wgmma of warpgroup . may still read",
    ),
    "a single buffer for ds": (
        "attn/bwd_sm90.cuh",
        "shared.ds(rows_at.stage)",
        "shared.ds(0)",
        "which a wgmma of warpgroup . may still read",
    ),
    "dq handed over without proxy fence": (
        "attn/bwd_sm90.cuh",
        "ptx::fence_proxy_async();\n        ptx::mbarrier_arrive(shared.dq_ring",
        "ptx::mbarrier_arrive(shared.dq_ring",
        "through the generic proxy",
    ),
    "dq given back while it is read": (
        "attn/bwd_load_store.cuh",
        "ptx::tma_wait_group_read<0>();\n            shared.dq_ring.release(dq_at);",
        "shared.dq_ring.release(dq_at);",
        "which a bulk store of thread .* may still read",
    ),
    "queries of dk alone released before dk is done": (
        "attn/bwd_wide_sm90.cuh",
        "ptx::wgmma_wait<0>();\n        ptx::wgmma_pin(dk);\n        this->release(shared.query_ring, at);",
        "this->release(shared.query_ring, at);\n        ptx::wgmma_wait<0>();",
        "which a wgmma of warpgroup . may still read",
    ),
    "weights read before they are written": (
        "attn/bwd_wide_sm90.cuh",
        "shared.weights_ring.wait_full(at);",
        "",
        "was written by thread|nobody has written|phase",
    ),
    "probabilities of 192 read before they are written": (
        "attn/bwd_192_sm90.cuh",
        "shared.ds_ring.wait_full(ds_at);",
        "",
        "was written by thread|nobody has written",
    ),
    "probabilities of 192 written over what dk still reads": (
        "attn/bwd_192_sm90.cuh",
        "shared.ds_ring.wait_empty(ds_at);",
        "",
        "may still read|was (read|written) by thread|has read, and nothing orders that read",
    ),
    "gradients of scores of 192 read before all have written them": (
        "attn/bwd_192_sm90.cuh",
        "ptx::named_barrier_sync<kWarpgroupSize>(1);",
        "",
        "generic proxy|was written by thread|nobody has written",
    ),
    "dout of 192 released before dv is done": (
        "attn/bwd_192_sm90.cuh",
        "c, shared.probs());\n        }\n        ptx::wgmma_wait<0>();",
        "c, shared.probs());\n        }",
        "which a wgmma of warpgroup . may still read",
    ),
    "gradients of scores of 192 without proxy fence": (
        "attn/bwd_192_sm90.cuh",
        "ptx::fence_proxy_async();\n        ptx::named_barrier_sync<kWarpgroupSize>(1);",
        "ptx::named_barrier_sync<kWarpgroupSize>(1);",
        "through the generic proxy",
    ),
    "dq of 64 and 192 written before it is given back": (
        "attn/bwd_roles.cuh",
        "shared.dq_ring.wait_empty(dq_at);",
        "",
        "which a bulk store of thread .* may still read",
    ),
    "probabilities of 64 read before they are written": (
        "attn/bwd_64_sm90.cuh",
        "shared.prob_ring.wait_full(probs_at);",
        "",
        "was written by thread|nobody has written|generic proxy",
    ),
    "probabilities of 64 written over what dv still reads": (
        "attn/bwd_64_sm90.cuh",
        "shared.prob_ring.wait_empty(probs_at);",
        "",
        "may still read|was (read|written) by thread|nobody has written",
    ),
    "gradients of scores of 64 read before they are written": (
        "attn/bwd_64_sm90.cuh",
        "shared.ds_ring.wait_full(ds_at);",
        "",
        "was written by thread|nobody has written|generic proxy",
    ),
    "gradients of scores of 64 written over what dk still reads": (
        "attn/bwd_64_sm90.cuh",
        "shared.ds_ring.wait_empty(ds_at);",
        "",
        "may still read|was (read|written) by thread|nobody has written",
    ),
    "dq of 64 handed over before it is done": (
        "attn/bwd_64_sm90.cuh",
        "ptx::wgmma_wait<1>();\n        ptx::wgmma_pin(dq);",
        "ptx::wgmma_wait<2>();\n        ptx::wgmma_pin(dq);",
        "an accumulator read before wgmma.wait_group",
    ),
    "dout of 64 released before dv is done": (
        "attn/bwd_64_sm90.cuh",
        "ptx::wgmma_wait<2>();",
        "",
        "which a wgmma of warpgroup . may still read",
    ),
    "queries of 64 released before dk is done": (
        "attn/bwd_64_sm90.cuh",
        "ptx::wgmma_wait<0>();\n        ptx::wgmma_pin(dk[0]);\n        this->release(shared.query_ring, queries_at);",
        "this->release(shared.query_ring, queries_at);\n        ptx::wgmma_wait<0>();",
        "which a wgmma of warpgroup . may still read",
    ),
    "registers of 64 asked for that the launch has already given": (
        "attn/bwd_64_sm90.cuh",
        "set_max_registers_down<Traits::kScoreRegisters>",
        "set_max_registers_up<Traits::kScoreRegisters>",
        "inc to 120 registers, but the warp has 128",
    ),
    "gradients of 64 stored for a key past the tile": (
        "attn/bwd_roles.cuh",
        "const i32 num_keys = work.row0 + work.rows - place.column;",
        "const i32 num_keys = work.row0 + work.rows - place.column + 1;",
        r"stores d[kv] \+ \d+, which thread \d+ of block . stores, too|lies in no buffer of the launch",
    ),
    "a reader of the mail of 64 and 192 that is not counted": (
        "attn/bwd_roles.cuh",
        "mail_ring.init(Rooms::kConsumerWarps + 1);",
        "mail_ring.init(Rooms::kConsumerWarps);",
        "ended in the middle of phase|has read, and nothing orders|was written by thread",
    ),
    "row statistics made of rows past the end": (
        "attn/bwd_rows.cuh",
        "if (block.head >= params.num_heads || row >= params.num_rows) return;",
        "if (block.head >= params.num_heads) return;",
        "lies in no buffer of the launch",
    ),
    "scores and gradients handed over without proxy fence": (
        "attn/bwd_roles.cuh",
        "ptx::fence_proxy_async();\n        ptx::mbarrier_arrive(ring.full(stage));",
        "ptx::mbarrier_arrive(ring.full(stage));",
        "through the generic proxy",
    ),
    "keys of dq alone released while they are multiplied": (
        "attn/bwd_dq_sm90.cuh",
        "issue_p_b<T>(dq, ds_16, shared.keys(keys_at.stage));\n        keys_at.advance();",
        "issue_p_b<T>(dq, ds_16, shared.keys(keys_at.stage));\n        release(shared.key_ring, keys_at);",
        "which a wgmma of warpgroup . may still read|more than",
    ),
    "dout of dq alone is not waited for": (
        "attn/bwd_dq_sm90.cuh",
        "expect_tx(full, Traits::kQueryBytes + Traits::kDoutBytes)",
        "expect_tx(full, Traits::kQueryBytes)",
        "fewer bytes were expected than copied|bytes more than expected",
    ),
}
# The leader issues before all lanes of its warp have waited: one that comes late misses a phase, under some seeds.
LATE_LANES = {
    "a tile of keys loaded": (
        "attn/key_producer.cuh",
        "ring.wait_empty(at);\n        ptx::sync_warp();\n",
        "ring.wait_empty(at);\n",
        "out of phase",
    ),
    "a tile of queries loaded": (
        "attn/bwd_load_store.cuh",
        "        ring.wait_empty(at);\n        ptx::sync_warp();\n",
        "        ring.wait_empty(at);\n",
        "out of phase",
    ),
    "dq added": (
        "attn/bwd_load_store.cuh",
        "wait(shared.dq_ring.full(dq_at), dq_at.parity);\n        ptx::sync_warp();\n",
        "wait(shared.dq_ring.full(dq_at), dq_at.parity);\n",
        "out of phase",
    ),
    "a message sent": (
        "include/mcp/mailbox.cuh",
        "ring.wait_empty(at);\n    ptx::sync_warp();\n",
        "ring.wait_empty(at);\n",
        "out of phase",
    ),
}
