"""Completes and checks layers of linear attention, and those that attend to keys picked by an index.

What cannot be built from their sizes is refused by `mcore/settings/mixers.py`, the same way for a swap-in. Each check
yields its faults as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_cp.mcore.settings.mixers import GATED_DELTA_NET, KIMI_DELTA
from megatron_cp.mcore.settings.sparse_settings import SPARSE
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
        yield from _complete_sparse(args)
        return
    names = next((names for names in (GATED_DELTA_NET, KIMI_DELTA) if variant in names), None)
    if names is None:
        yield (
            f"--experimental-attention-variant {variant} is not served: it chooses layers that ours do not stand for, "
            "here or in Megatron-LM's program; gated_delta_net, kimi_delta_attention and dsa are served"
        )
        args.experimental_attention_variant = None
        return
    args.experimental_attention_variant = names[0]
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
            f"--experimental-attention-variant {names[0]} takes the activation of the MLP, and is made for SiLU; "
            "give --swiglu (another model)"
        )


def _complete_sparse(args: Namespace) -> Iterator[str]:
    """Says what sparse attention makes of flags that plain attention heeds."""
    if args.linear_attention_freq is not None:
        yield (
            "--linear-attention-freq with --experimental-attention-variant dsa makes no layer linear; leave it out "
            "(the same model)"
        )
    if args.attention_dropout:
        args.notes.append(
            f"--attention-dropout {args.attention_dropout} changes nothing here: sparse attention has none, in "
            "Megatron-LM too"
        )
    if args.cp_max_received_mb is not None:
        yield (
            f"--cp-max-received-mb {args.cp_max_received_mb} with --experimental-attention-variant dsa is not served: "
            "every key that a query may see travels, however plans are made; leave it out"
        )
        args.cp_max_received_mb = None
    if args.context_parallel_size > 1 or args.spans_replicas:
        args.notes.append(
            "bytes and times that plans and reports foretell are those of attention to all keys; sparse attention "
            "looks at its pairs where the query lies: --cp-planner auto is magi, which balances those"
        )
    modules = args.recompute_modules or ("core_attn",)
    if args.recompute_granularity == "selective":
        for name in sorted({"core_attn", "mla_up_proj"}.intersection(modules)):
            args.notes.append(
                f"recomputing {name} changes nothing here: sparse attention keeps no scores, but it keeps its queries "
                "and latent rows; --recompute-granularity full saves that memory"
            )
