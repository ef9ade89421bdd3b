"""What compiled graphs do not hold: plain Python at which they are left and entered again."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_compiled_graphs(function: F) -> F:
    """Returns the function, at which compiled code is left and entered again behind it.

    `torch.compiler.disable` alone does this too; it costs every uncompiled call half a microsecond, and the import
    of this module a second.
    """
    disabled = torch._disable_dynamo(function)  # type: ignore[no-untyped-call, attr-defined, unused-ignore]

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return disabled(*arguments, **named)
        return function(*arguments, **named)

    return cast(F, call)
