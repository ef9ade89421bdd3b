"""Completes and checks layers of linear attention, and those that attend to keys picked by an index.

What cannot be built from their sizes is refused by `mcore/mixers.py`, the same way for a swap-in. Each check
yields its faults as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_cp.mcore.mixers import GATED_DELTA_NET
from megatron_cp.mcore.sparse_settings import SPARSE, planner_of
from megatron_cp.training.arguments.faults import discard, require


def complete_linear(args: Namespace) -> Iterator[str]:
    """Completes the kind of linear layers, and says what it needs."""
    variant = args.experimental_attention_variant
    if variant is None:
        if args.linear_attention_freq is not None:
            yield (
                f"--linear-attention-freq {args.linear_attention_freq} without --experimental-attention-variant makes "
                "no layer linear; give --experimental-attention-variant gated_delta_net"
            )
        return
    if variant == SPARSE:
        if args.linear_attention_freq is not None:
            yield (
                "--linear-attention-freq with --experimental-attention-variant dsa makes no layer linear; leave it out "
                "(the same model)"
            )
        if planner_of(args, args.cp_planner) != args.cp_planner and args.context_parallel_size > 1:
            args.notes.append(
                "--cp-planner auto is magi with sparse attention: every rank looks at the pairs of its own queries, "
                "and magi balances those"
            )
        if args.attention_dropout:
            args.notes.append(
                f"--attention-dropout {args.attention_dropout} changes nothing here: sparse attention has none, in "
                "Megatron-LM too"
            )
        return
    if variant not in GATED_DELTA_NET:
        yield (
            f"--experimental-attention-variant {variant} is not served: it chooses layers that ours do not stand for, "
            "here or in Megatron-LM's program; gated_delta_net and dsa are served"
        )
        args.experimental_attention_variant = None
        return
    args.experimental_attention_variant = GATED_DELTA_NET[0]
    if args.linear_attention_freq is None:
        yield (
            "--linear-attention-freq is missing; it has no default: N, every Nth layer is softmax attention, or a list "
            "of 0 and 1 (linear)"
        )
        discard(args, "linear_attention_freq")
    yield from require(
        args,
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
    )
    if not args.swiglu:
        yield (
            "--experimental-attention-variant gated_delta_net takes the activation of the MLP, and is made for SiLU; "
            "give --swiglu (another model)"
        )
