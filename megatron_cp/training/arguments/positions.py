"""Checks settings of positions that Megatron-Core would not heed: the model would be another one than asked for.

Each check yields its faults as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_cp.mcore.settings.longrope_settings import LONGROPE, are_factors, is_long
from megatron_cp.mcore.settings.sparse_settings import is_sparse

# Value without effect on anything, by attribute. Core's YaRN takes base and factors of its own alone.
_NOT_BY_YARN: Mapping[str, Any] = {
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
}
_NOT_BY_LATENT: Mapping[str, Any] = {
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "no_rope_freq": None,
    "llama_4_scaling_beta": None,
    "yarn_original_max_position_embeddings": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
    "yarn_correction_range_round_to_int": None,
}

_MEGATRONS_SCALING_FACTOR = 8.0


def check_yarn(args: Namespace) -> Iterator[str]:
    """Yields what YaRN of plain attention does not do, and what nothing else does."""
    if args.multi_latent_attention:
        return
    if args.position_embedding_type != "yarn":
        if args.llama_4_scaling_beta is not None:
            yield (
                f"--llama-4-scaling-beta {args.llama_4_scaling_beta} needs --position-embedding-type yarn, whose "
                "--yarn-original-max-position-embeddings it counts in; give both, or leave it out"
            )
        return
    if args.llama_4_scaling_beta and args.reset_attention_mask and not args.reset_position_ids:
        yield (
            f"--llama-4-scaling-beta {args.llama_4_scaling_beta} with --reset-attention-mask needs "
            "--reset-position-ids: queries would be scaled by their place in the pack, not in their document; add it"
        )
    if args.rotary_interleaved:
        yield (
            "--rotary-interleaved with --position-embedding-type yarn is not served: Megatron-Core's YaRN rotates "
            "halves alone; train a model without --rotary-interleaved, or with --position-embedding-type rope"
        )
    yield from _unheeded(args, _NOT_BY_YARN, "--position-embedding-type yarn")


def note_stretched_positions(args: Namespace) -> Iterator[str]:
    """Notes settings that Megatron-LM's own program takes and passes to no model: its weights mean others.

    Source: `gpt_builders.py` and `gpt_config_from_args` of Megatron-LM core_v0.16 to 0.20.
    """
    if args.multi_latent_attention or args.position_embedding_type != "rope":
        return
    if args.use_rope_scaling and args.rope_scaling_factor != _MEGATRONS_SCALING_FACTOR:
        args.notes.append(
            f"--rope-scaling-factor {args.rope_scaling_factor} is heeded here; Megatron-LM's pretrain_gpt.py (0.16 to "
            "0.20) scales by 8 whatever it says: a model that it trained goes on with --rope-scaling-factor 8"
        )
    if args.rotary_seq_len_interpolation_factor is not None:
        args.notes.append(
            f"--rotary-seq-len-interpolation-factor {args.rotary_seq_len_interpolation_factor} is heeded here; "
            "Megatron-LM's programs before 0.18 (hybrid models) and 0.19 (GPT) do not: a model that they trained goes "
            "on without it"
        )
    yield from ()  # it notes, and finds no fault


_NOT_BESIDE_LONGROPE: Mapping[str, Any] = {
    "multi_latent_attention": False,
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "hybrid_layer_pattern": None,
}


def check_longrope(args: Namespace) -> Iterator[str]:
    """Yields what LongRoPE lacks, and what it does not go with; notes which factors the run takes."""
    given = [name for name in LONGROPE if getattr(args, name) is not None]
    if not given:
        return
    flags = {name: f"--{name.replace('_', '-')}" for name in (*LONGROPE, *_NOT_BESIDE_LONGROPE)}
    missing = [flags[name] for name in LONGROPE if name not in given]
    if missing:
        yield f"{flags[given[0]]} needs {', '.join(missing)}: LongRoPE has four settings; give all, or none"
        return
    if args.position_embedding_type != "rope":
        yield (
            f"{flags[given[0]]} with --position-embedding-type {args.position_embedding_type} is not served: LongRoPE "
            "divides RoPE's frequencies; give --position-embedding-type rope"
        )
    for name, default in _NOT_BESIDE_LONGROPE.items():
        if getattr(args, name) != default:
            yield (
                f"{flags[given[0]]} with {flags[name]} is not served: LongRoPE stretches positions by itself, in GPT "
                "models with plain attention; leave one of them out"
            )
    count = int(args.kv_channels * args.rotary_percent) // 2
    for name in LONGROPE[:2]:
        factors = getattr(args, name)
        if not are_factors(factors, count):
            yield (
                f"{flags[name]} of {len(factors)} must be {count} positive numbers, one for each frequency of a head "
                f"of {args.kv_channels} with --rotary-percent {args.rotary_percent}"
            )
    kind, where = ("long", "longer than") if is_long(vars(args)) else ("short", "not longer than")
    args.notes.append(
        f"LongRoPE takes its {kind} factors, for every document: --seq-length {args.seq_length} is {where} "
        f"{flags[LONGROPE[2]]} {args.longrope_original_max_position_embeddings}"
    )


def check_latent_positions(args: Namespace) -> Iterator[str]:
    """Yields what latent attention, which rotates by itself, does not do."""
    if not args.multi_latent_attention:
        return
    kind = args.position_embedding_type
    if kind == "yarn":
        yield (
            "--position-embedding-type yarn with --multi-latent-attention is not served: latent attention rotates by "
            "itself; give --position-embedding-type rope, and --rope-type yarn, the default, is its YaRN"
        )
    if kind == "none":
        yield (
            "--position-embedding-type none with --multi-latent-attention is not served: latent attention would rotate "
            "all the same; give --position-embedding-type rope, and --rope-type none for a model without positions"
        )
    if args.rope_type == "none" and is_sparse(args):
        yield (
            "--rope-type none with --experimental-attention-variant dsa is not served: its index rotates; train a "
            "model with --rope-type rope"
        )
    ignored = dict(_NOT_BY_LATENT)
    if args.rope_type != "rope":
        ignored["rotary_percent"] = 1.0
    yield from _unheeded(args, ignored, "--multi-latent-attention")


def _unheeded(args: Namespace, ignored: Mapping[str, Any], beside: str) -> Iterator[str]:
    """Yields a line for each of these settings that is given."""
    for name, default in ignored.items():
        value = getattr(args, name)
        if value == default:
            continue
        words = "" if isinstance(value, bool) else f" {value}"
        flag = f"--{name.replace('_', '-')}{words}"
        yield (
            f"{flag} with {beside} is not served: Megatron-Core does not read it there, and the model would be another "
            "one than asked for; leave it out for the model that Megatron-LM trains with it"
        )
