"""What `torch.compile` calls as it is: plans, masks and collectives are no tensors that it could trace."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def eager(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Returns the function with a break of the graph around it; code before and after is compiled.

    `torch.compiler.disable` does this too, but imports the compiler, a second, where nobody compiles; so
    does torch's own `_disable_dynamo`, at the first call.
    """
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not torch.compiler.is_compiling() and "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        result: Result = disabled(*args, **kwargs)
        return result

    return called
