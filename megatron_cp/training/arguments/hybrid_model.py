"""Completes and checks a hybrid model: the pattern of its layers, and what Megatron-Core's stack of them does not do.

Sizes of its mixers are checked by `mcore/settings/mixers.py`, the same way for a swap-in. Each check yields its faults
as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_cp.mcore.settings.hybrid_pattern import EXPERTS, hybrid_pattern
from megatron_cp.training.arguments.faults import discard, require

# Specs of Megatron-Core's own stack: ours computes the same, with our attention.
MEGATRONS_SPECS = frozenset(
    {
        ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
        ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
        ("megatron_cp.mcore.hybrid", "hybrid_stack_spec"),
    }
)

_SIZES = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups")

# Attribute -> its value without effect, and what there is instead.
_NOT_SERVED = {
    "multi_latent_attention": (False, "train a model without it"),
    "num_layers_per_virtual_pipeline_stage": (None, "give each rank one stage: the same model"),
    "num_virtual_stages_per_pipeline_rank": (None, "give each rank one stage: the same model"),
    "pipeline_model_parallel_layout": (None, "mark stages by | in the pattern"),
    "account_for_embedding_in_pipeline_split": (False, "mark stages by | in the pattern"),
    "account_for_loss_in_pipeline_split": (False, "mark stages by | in the pattern"),
    "use_rope_scaling": (False, "train a model without it"),
    "no_rope_freq": (None, "train a model without it"),
    "moe_layer_freq": (1, "leave it out: E in the pattern says which layers have experts"),
    "fp32_residual_connection": (False, "train a model without it"),
}


def complete_hybrid_model(args: Namespace) -> Iterator[str]:
    """Completes the numbers of layers and predictions, and of layers on the first and last stage, by the pattern."""
    older = args.hybrid_override_pattern
    if older is not None:
        if args.hybrid_layer_pattern not in (None, older):
            yield (
                "--hybrid-override-pattern is the older name of --hybrid-layer-pattern, and they differ; give one"
            )
        args.hybrid_layer_pattern = older
    if args.hybrid_layer_pattern is None:
        if args.is_hybrid_model:
            yield "--is-hybrid-model needs --hybrid-layer-pattern, which says what each layer is; give it, as M-M*-"
        return
    args.is_hybrid_model = True  # Megatron-LM 0.20 takes it from the pattern
    flag = f"--hybrid-layer-pattern {args.hybrid_layer_pattern}"
    try:
        pattern = hybrid_pattern(args.hybrid_layer_pattern)
    except ValueError as problem:
        yield (
            f"{flag}: {problem}; M is Mamba-2, * attention, - an MLP, E experts, | the next pipeline stage, / a "
            "prediction"
        )
        discard(args, "hybrid_layer_pattern")
        return
    letters, stages = pattern.layers, pattern.stages
    if args.num_layers not in (None, len(letters)):
        args.notes.append(
            f"--num-layers {args.num_layers} changes nothing here: {flag} has {len(letters)} layers, and wins as in "
            "Megatron-LM 0.20"
        )
    if args.mtp_num_layers not in (None, pattern.num_predictions):
        yield (
            f"--mtp-num-layers {args.mtp_num_layers} with {flag}, which has the layers of {pattern.num_predictions} "
            "predictions, each behind a /; leave out --mtp-num-layers, or write as many in the pattern"
        )
    args.num_layers, args.hybrid_layer_pattern = len(letters), pattern.without_bars
    args.mtp_num_layers = pattern.num_predictions or None
    if len(stages) > 1:
        yield from _complete_stages(args, flag, [len(stage) for stage in stages])
    yield from require(args, *_SIZES)
    if args.mamba_num_heads is not None:
        yield from require(args, "mamba_num_heads")


def _complete_stages(args: Namespace, flag: str, lengths: list[int]) -> Iterator[str]:
    """Says by Megatron-Core's older settings how many layers each stage holds."""
    pp = args.pipeline_model_parallel_size
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    if any(getattr(args, name) is not None for name in ends):
        yield f"{flag} marks its stages; leave out --decoder-first- and --decoder-last-pipeline-num-layers"
        return
    if len(lengths) != pp:
        yield f"{flag} has {len(lengths)} stages; --pipeline-model-parallel-size is {pp}; give as many"
        return
    if len(set(lengths[1:-1])) > 1 or not all(lengths):
        yield (
            f"{flag} has stages of {', '.join(map(str, lengths))} layers: none may be empty, and those between the "
            "first and the last must have equally many; move a |"
        )
        return
    if len(set(lengths)) > 1:
        args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers = (
            lengths[0],
            lengths[-1],
        )


def check_hybrid_model(args: Namespace) -> Iterator[str]:
    """Yields what a hybrid model does not have here, and what its pattern lacks."""
    if args.hybrid_layer_pattern is None:
        return
    for name, (neutral, instead) in _NOT_SERVED.items():
        value = getattr(args, name)
        if value != neutral:
            words = "" if isinstance(value, bool) else f" {value}"
            yield (
                f"--{name.replace('_', '-')}{words} with --hybrid-layer-pattern is not served; {instead}"
            )
    _note_norms(args)
    if args.position_embedding_type == "yarn":
        yield (
            "--position-embedding-type yarn with --hybrid-layer-pattern is not served; train a model with rope or none"
        )
    has_experts = EXPERTS in args.hybrid_layer_pattern
    if has_experts and args.num_experts is None:
        yield "--hybrid-layer-pattern has layers of experts (E); give --num-experts"
    if args.num_experts is not None and not has_experts:
        yield (
            f"--num-experts {args.num_experts} with a --hybrid-layer-pattern without E has no layer; write E where "
            "they are"
        )
    if args.mtp_use_repeated_layer and args.moe_z_loss_coeff is not None:
        yield (
            f"--moe-z-loss-coeff {args.moe_z_loss_coeff} with --mtp-use-repeated-layer is not served: Megatron-LM "
            "counts it in each prediction, and logs it as if it were shared; leave one out"
        )
    if "muon" in args.optimizer:
        yield (
            f"--optimizer {args.optimizer} with --hybrid-layer-pattern is not served: which of a mixer's matrices it "
            "may take differs by version of Megatron-Core; give --optimizer adam (other steps)"
        )


def _note_norms(args: Namespace) -> None:
    """Notes norms of queries and keys: Megatron-LM takes their flags and builds none in a hybrid model.

    Source: `SelfAttentionSubmodules` in its `hybrid_stack_spec`, core_v0.16 to 0.20.
    """
    for name in ("qk_layernorm", "qk_l2_norm"):
        if getattr(args, name):
            args.notes.append(
                f"--{name.replace('_', '-')} with --hybrid-layer-pattern is heeded here; Megatron-LM's own "
                "hybrid_stack_spec (0.16 to 0.20) has no such norms: a model that it trained goes on without it"
            )
