"""How a checkpoint's groups of parameters are known again: Megatron-Core before 0.19, since then, and ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

RATES = ("max_lr", "min_lr")
"""What a group of parameters says of its learning rate; the schedule takes these before its own."""


def name_decoupled_groups(optimizer: Any) -> None:
    """Says of each group of parameters whether it has a learning rate of its own (`--decoupled-lr`), before 0.19.

    ``optimizer`` is Megatron's. A checkpoint knows its groups by that among others. Megatron-Core says no of all
    of them, so that a loaded run gave the embedding's rate to the other parameters (measured on 0.16: loss off by 4e-3
    one step later). From 0.19 on the rates themselves tell groups apart.
    """
    if not _tells_groups_by_rate():
        _mark_decoupled(optimizer.param_groups)


@contextmanager
def groups_found_at_any_rate(inner: Any, loaded: Any) -> Iterator[None]:
    """Megatron finds groups of parameters in a loaded state by what they are, not by their learning rates too.

    ``inner`` is Megatron's optimizer. It does so before 0.19. Since then it knows no group of a checkpoint again whose
    --lr was another, whichever of the two the user lets win. Groups that differ in rates alone are still told apart by
    them; one with a rate of its own (`--decoupled-lr`) is marked, which Megatron does in no version.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    groups: list[dict[str, Any]] = inner.param_groups
    _mark_decoupled([*groups, *_groups_in(loaded)])
    every: tuple[str, ...] = optimizer.param_group_identifier_keys
    keys = tuple(key for key in every if key not in RATES)
    found, told_apart = (
        {tuple(map(group.get, names)) for group in groups} for names in (keys, every)
    )
    if len(found) < len(told_apart):
        keys = every
    try:
        for module in (distrib_optimizer, optimizer):
            module.param_group_identifier_keys = keys
        yield
    finally:
        for module in (distrib_optimizer, optimizer):
            module.param_group_identifier_keys = every
        if _tells_groups_by_rate():
            for group in inner.param_groups:
                group["is_decoupled_lr"] = False  # as Megatron saves it, and looks for it


def is_decoupled(group: Mapping[str, Any]) -> bool:
    """Returns whether a group of parameters has a learning rate of its own, as far as it says."""
    return not group.get("default_config", not group.get("is_decoupled_lr", False))


def _mark_decoupled(groups: Iterable[dict[str, Any]]) -> None:
    for group in groups:
        group["is_decoupled_lr"] = is_decoupled(group)


def _tells_groups_by_rate() -> bool:
    """Returns whether Megatron knows groups of parameters in a checkpoint by their rates too: from 0.19 on."""
    from megatron.core.optimizer import optimizer

    return any(name in optimizer.param_group_identifier_keys for name in RATES)


def _groups_in(state: Any) -> Iterator[dict[str, Any]]:
    """Yields the groups of parameters anywhere in the state of an optimizer."""
    if isinstance(state, dict):
        yield from filter(None, state.get("param_groups", ()))
        for name, part in state.items():
            if name != "param_groups":
                yield from _groups_in(part)
    elif isinstance(state, list):
        for part in state:
            yield from _groups_in(part)
