"""Says of which flags Megatron-Core speaks when it refuses a model: its words name its own settings, or none.

Each flag is left out in turn. The refusal hangs on those without which the model is taken; where there is none, on
those without which it is refused in other words.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatron_cp.training.arguments import defaults_of_flags, flags_of

Arguments = Mapping[str, Any]
T = TypeVar("T")
_OF_EVERY_MODEL = {"num_layers", "hidden_size", "num_attention_heads"}  # they have no default
_REFUSALS = (AssertionError, ImportError, NotImplementedError, ValueError)


def built(build: Callable[[Arguments], T], arguments: Arguments) -> T:
    """Returns what Megatron-Core builds of these arguments, without a process group.

    Raises ValueError with the flags that its refusal hangs on, and its words.
    """
    try:
        return build(arguments)
    except _REFUSALS as problem:
        said = _words_of(problem)
        flags = _flags_behind(said, build, arguments)
        advice = "change or leave out one of them" if flags[1:] else "change it or leave it out"
        text = f"Megatron-Core refuses {', '.join(flags) or 'this model'}: {said}"
        raise ValueError(f"{text}; {advice}" if flags else text) from problem


def _flags_behind(said: str, build: Callable[[Arguments], T], arguments: Arguments) -> list[str]:
    defaults = defaults_of_flags()
    others = {name: value for name, value in arguments.items() if value != defaults.get(name)}
    names = sorted((others.keys() & defaults.keys()) - _OF_EVERY_MODEL)
    without = {n: _refusal(build, {**arguments, n: defaults[n]}) for n in names}
    # Of two faults the first is told alone: without its flag there is still the second.
    taken = [name for name, other in without.items() if other is None]
    behind = taken or [name for name, other in without.items() if other != said]
    spelled = (" ".join(flags_of({name: arguments[name]})) for name in behind)
    return [flag.replace("=", " ") for flag in spelled if flag]


def _refusal(build: Callable[[Arguments], T], arguments: Arguments) -> str | None:
    try:
        build(arguments)
    except Exception as problem:  # one default among other values may be no model at all
        return _words_of(problem)
    return None


def _words_of(problem: Exception) -> str:
    """Returns what was said; of an assertion without words, the line that asserts."""
    return str(problem).rstrip(". ") or str(traceback.extract_tb(problem.__traceback__)[-1].line)
