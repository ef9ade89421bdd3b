"""The optimizer's state, put into as many parts as the run's optimizer has.

Megatron keeps experts that are dealt to ranks in an optimizer of their own, so with expert parallelism a checkpoint
has two parts, and without one:

    one part      {"param_groups": ..., "state": ...}
    several       {0: {"param_groups": ...}, 1: ...}

Tensors are saved by the names of parameters and fit either way. What is left are settings of groups, equal on all
ranks: learning rate, step count. Megatron-Core merges both by position, and so cannot go from one to the other.

Of several parts that of experts holds nothing on a pipeline stage without any. What it would hold is then missing in
what that stage loads, and is an empty place in the settings if it was the stage of rank 0, which says those of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_cp.mcore.checkpoint.optimizer import parts_of
from megatron_cp.mcore.checkpoint.parameter_groups import is_decoupled
from megatron_cp.training.checkpoint.compare import another_optimizer

# What tells groups apart; whether a group holds experts goes with the layout.
_KIND = ("wd_mult", "lr_mult")
_COPIES = "fp32_from_fp16_params"


def check_groups(folder: object, optimizer: Any, saved: Mapping[Any, Any]) -> None:
    """Raises ValueError where as many parts were saved with other numbers of groups, which cannot be merged."""
    parts = parts_of(optimizer)
    numbers = sorted(key for key in saved if isinstance(key, int))
    before = [saved[key] for key in numbers] or [saved]
    if len(before) != len(parts):
        return
    for part, settings in zip(parts, before, strict=True):
        groups = settings.get("optimizer", settings).get("param_groups")
        now = len(part.param_groups)
        if groups is not None and len(groups) != now:
            raise another_optimizer(
                folder,
                f"it has {len(groups)} groups of parameters and this run {now}, which --decoupled-lr and flags of "
                "weight decay decide",
            )


def without_empty_places(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the settings without the lists of float32 copies of a part that held none where it was saved.

    Megatron-Core cannot put the copies of another stage into them.
    """
    return {
        key: {name: value for name, value in part.items() if name != _COPIES}
        if isinstance(key, int)
        else part
        for key, part in saved.items()
    }


def in_parts_of(
    optimizer: Any, loaded: Mapping[Any, Any], saved: Mapping[Any, Any], folder: object
) -> Mapping[Any, Any]:
    """Returns `loaded` in the parts of Megatron's `optimizer`; each is as it is where it was `saved` in as many.

    `loaded` holds this rank's tensors beside `saved`, the settings that are equal on all ranks. Raises ValueError, on
    every rank alike, where no settings were saved for a group of the optimizer.
    """
    parts = parts_of(optimizer)
    are_several, were_several = len(parts) > 1, 0 in saved
    settings = saved[0] if were_several else saved
    if not are_several and not were_several:
        return loaded
    if not are_several:
        return _part(
            {key: loaded[key] for key in loaded if not isinstance(key, int)},
            settings,
            parts[0],
            folder,
        )
    split = loaded
    if not were_several:
        split = {
            index: _part(loaded.get(index, {}), settings, part, folder)
            for index, part in enumerate(parts)
        }
    own = {index: part.state_dict() for index, part in enumerate(parts) if _holds_nothing(part)}
    return {**split, **{index: _completed(split[index], state) for index, state in own.items()}}


def _holds_nothing(part: Any) -> bool:
    """Returns whether a part has no parameter on this rank. That of a sharded optimizer knows so by itself."""
    if part.config.use_distributed_optimizer or part.optimizer is None:  # None: nor on any other
        return False
    return not any(group["params"] for group in part.optimizer.param_groups)


def _completed(loaded: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was loaded, and what is held of anything else, at both depths of a state."""
    inner = {"optimizer": {**own["optimizer"], **loaded["optimizer"]}} if "optimizer" in own else {}
    return {**own, **loaded, **inner}


def _part(
    own: Mapping[str, Any], saved: Mapping[str, Any], part: Any, folder: object
) -> dict[str, Any]:
    """Returns the state of one part: its own tensors, and the settings that were saved for groups like its own."""
    if "optimizer" in saved:  # beside main parameters, or a loss scale
        inner = _part(own.get("optimizer", {}), saved["optimizer"], part, folder)
        return {**saved, **own, "optimizer": inner}
    groups = part.optimizer.param_groups
    known = {_kind(group): group for group in saved["param_groups"]}
    for group in groups:
        if _kind(group) not in known:
            told = ", ".join(f"{key}={group[key]}" for key in _KIND)
            told += f", is_decoupled_lr={is_decoupled(group)}"
            raise another_optimizer(folder, f"it has no group of parameters with {told}")
    tensors = own.get("param_groups", [{}] * len(groups))
    merged = [
        {**known[_kind(group)], "is_expert_parallel": group["is_expert_parallel"], **mine}
        for group, mine in zip(groups, tensors, strict=True)
    ]
    state = {**saved.get("state", {}), **own.get("state", {})}
    return {**saved, **own, "param_groups": merged, **({"state": state} if state else {})}


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*(group[key] for key in _KIND), is_decoupled(group))
