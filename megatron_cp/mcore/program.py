"""The Megatron-LM program that this process runs, if it runs one: its arguments and its tokenizer.

Nothing is imported: a program that has not loaded `megatron.training` is not Megatron-LM.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any


def arguments() -> Namespace | None:
    """Returns the parsed arguments of Megatron-LM; None where it does not run, or has not parsed them yet."""
    return _global("_GLOBAL_ARGS")


def tokenizer() -> Any:
    """Returns Megatron-LM's tokenizer; None where there is none."""
    return _global("_GLOBAL_TOKENIZER")


def _global(name: str) -> Any:
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)
