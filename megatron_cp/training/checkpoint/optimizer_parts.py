"""The optimizer's state, put into as many parts as the run's optimizer has.

Megatron keeps experts that are dealt to ranks in an optimizer of their own, so with expert parallelism a checkpoint
has two parts, and without one:

    one part      {"param_groups": ..., "state": ...}
    several       {0: {"param_groups": ...}, 1: ...}

Tensors are saved by the names of parameters and fit either way. What is left are settings of groups, equal on all
ranks: learning rate, step count. Megatron-Core merges both by position, and so cannot go from one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KIND = (
    "wd_mult",
    "lr_mult",
    "is_decoupled_lr",
)  # of a group; whether it holds experts goes with the layout


def in_parts_of(
    optimizer: Any, loaded: Mapping[Any, Any], saved: Mapping[Any, Any]
) -> Mapping[Any, Any]:
    """Returns `loaded` in the parts of Megatron's `optimizer`; as it is where it was `saved` in as many.

    `loaded` holds this rank's tensors beside `saved`, the settings that are equal on all ranks. Raises KeyError for the
    settings of other groups.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    are_several, were_several = len(parts) > 1, 0 in saved
    if are_several == were_several:
        return loaded
    settings = saved[0] if were_several else saved
    if not are_several:
        return _part(
            {key: loaded[key] for key in loaded if not isinstance(key, int)}, settings, parts[0]
        )
    return {index: _part(loaded.get(index, {}), settings, part) for index, part in enumerate(parts)}


def _part(own: Mapping[str, Any], saved: Mapping[str, Any], part: Any) -> dict[str, Any]:
    """Returns the state of one part: its own tensors, and the settings that were saved for groups like its own."""
    if "optimizer" in saved:  # beside main parameters, or a loss scale
        inner = _part(own.get("optimizer", {}), saved["optimizer"], part)
        return {**saved, **own, "optimizer": inner}
    groups = part.optimizer.param_groups
    known = {tuple(group[key] for key in _KIND): group for group in saved["param_groups"]}
    tensors = own.get("param_groups", [{}] * len(groups))
    merged = [
        {
            **known[tuple(group[key] for key in _KIND)],
            "is_expert_parallel": group["is_expert_parallel"],
            **{key: mine[key] for key in mine if key == "params"},
        }
        for group, mine in zip(groups, tensors, strict=True)
    ]
    state = {**saved.get("state", {}), **own.get("state", {})}
    return {**saved, **own, "param_groups": merged, **({"state": state} if state else {})}
