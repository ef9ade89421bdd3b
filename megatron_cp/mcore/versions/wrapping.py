"""Hooks in the place of Megatron's functions: each is put there once, and knows what it wraps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_PLAIN = "_megatron_cp_plain"  # attribute of a hook: the function that it wraps


def hook_around(plain: Callable[..., Any], wrap: Wrap) -> Callable[..., Any]:
    """Returns `wrap(plain)` under the name of the function that it wraps."""
    hook = functools.wraps(plain)(wrap(plain))
    setattr(hook, _PLAIN, plain)
    return hook


def is_hook(function: Any) -> bool:
    """Returns whether a function is one of ours around another."""
    return hasattr(function, _PLAIN)


def without_hook(function: Any) -> Any:
    """Returns the function that a hook wraps; any other as it is."""
    return getattr(function, _PLAIN, function)


def put_hook(owner: Any, name: str, wrap: Wrap) -> None:
    """Puts a hook in the place of a function of a module or a class. A second call changes nothing."""
    plain = getattr(owner, name)
    if not is_hook(plain):
        setattr(owner, name, hook_around(plain, wrap))
