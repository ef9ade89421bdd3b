"""Which Megatron we know, and where the hooks take hold of it: functions and the parameters they rely on.

Data only, so that `doctor --megatron CHECKOUT` can compare it with a checkout that is never imported.
"""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, ...]

OLDEST: Version = (0, 16, 1)
TESTED: tuple[Version, ...] = (
    (0, 16, 1),
    (0, 17, 1),
    (0, 18, 2),
    (0, 19, 0),
    (0, 20, 0),
)


def dotted(*versions: Version) -> str:
    """Returns versions as people write them."""
    return ", ".join(".".join(map(str, version)) for version in versions)


def is_too_old(version: Version, is_candidate: bool) -> bool:
    """Returns whether a Megatron is older than what is served, by the number that it gives itself.

    A checkout between releases calls itself a candidate (rc) of a release that may be long out: slime's Megatron-LM is
    0.16.0rc0 and newer than 0.16.0. Such a one of the oldest series goes on where the hooks fit it.
    """
    return version < OLDEST and not (is_candidate and version[:2] == OLDEST[:2])


@dataclass(frozen=True)
class HookPoint:
    """A function of Megatron that gets a hook."""

    name: str
    """Its name; with the class, where it is a method."""
    files: tuple[str, ...]
    """Files that may define it, by version; a folder stands for all files in it."""
    parameters: tuple[str, ...]
    """Parameters that it must have."""
    first: tuple[str, ...] = ()
    """What its first parameter may be called; empty: anything."""
    is_needed: bool = True
    """False: only some versions have it."""


_MODEL_INPUTS = ("input_ids", "position_ids", "attention_mask", "labels", "packed_seq_params")

HOOK_POINTS = (
    HookPoint(
        "get_batch_on_this_tp_rank",
        ("megatron/core/utils.py", "megatron/training/utils.py", "megatron/training/utils"),
        (),
        first=("data_iterator", "batch"),
    ),
    HookPoint("get_batch_on_this_cp_rank", ("megatron/core/utils.py",), ("cp_group",), ("batch",)),
    HookPoint(
        "get_thd_batch_on_this_cp_rank",
        ("megatron/core/utils.py",),
        ("cu_seqlens", "cu_seqlens_padded"),
        ("batch",),
        is_needed=False,
    ),
    HookPoint(
        "is_first_or_last_pipeline_stage",
        ("megatron/training/utils.py", "megatron/training/utils"),
        (),
    ),
    HookPoint(
        "forward_step_calc_loss",
        ("megatron/core/pipeline_parallel/schedules.py",),
        ("output_tensor", "loss_func", "config"),
        ("model",),
    ),
    HookPoint(
        "GPTModel.__init__",
        ("megatron/core/models/gpt/gpt_model.py",),
        ("config", "transformer_layer_spec"),
        ("self",),
    ),
    HookPoint(
        "TransformerBlock.__init__",
        ("megatron/core/transformer/transformer_block.py",),
        ("config", "spec"),
        ("self",),
    ),
    HookPoint(
        "GPTModel.forward",
        ("megatron/core/models/gpt/gpt_model.py",),
        _MODEL_INPUTS,
        ("self",),
    ),
    HookPoint(
        "MambaModel.forward",
        ("megatron/core/models/mamba/mamba_model.py",),
        _MODEL_INPUTS,
        ("self",),
        is_needed=False,
    ),
    HookPoint(
        "HybridModel.forward",
        ("megatron/core/models/hybrid/hybrid_model.py",),
        _MODEL_INPUTS,
        ("self",),
        is_needed=False,
    ),
)


def mismatch(point: HookPoint, parameters: list[str]) -> str | None:
    """Returns what a function with these parameters lacks for the hook, in words; None if it fits."""
    if point.first and parameters[:1] != [] and parameters[0] not in point.first:
        return f"its first parameter is {parameters[0]}, the hook knows {' or '.join(point.first)}"
    missing = [name for name in point.parameters if name not in parameters]
    return f"it has no parameter {', '.join(missing)}" if missing else None
