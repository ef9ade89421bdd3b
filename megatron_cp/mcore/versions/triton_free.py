"""Lets Megatron-Core 0.18 and later be imported where triton is not installed.

From 0.18 on one module of Megatron, which the training path imports, says `import triton` without
a guard: a CPU build of torch has no triton, and `import megatron.core` ends there. The stand-in is
seen by these modules alone and only while they are imported, so torch's own questions for triton
(`import triton`, `importlib.util.find_spec`) still get the true answer. A kernel declared with the
stand-in raises when it is launched.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

NEEDS_TRITON = (
    "megatron.core.transformer.moe.paged_stash",  # 0.18
    "megatron.core.transformer.moe.ops.paged_stash",  # 0.19 and 0.20
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",  # 0.16 and 0.17, by megatron.training
    "megatron.core.ssm.",  # 0.19 and 0.20, by megatron.training
)
"""Beginnings of the names of modules that import triton unguarded and are imported in order to train."""


def install() -> bool:
    """Returns True if imports of these modules are now served, False where triton is installed.

    A second call changes nothing.
    """
    if importlib.util.find_spec("triton") is not None:
        return False
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return True


class _Kernel:
    """Stands for a triton kernel; only its launch is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: object) -> _Kernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"triton kernel {self._name} was launched, but triton is not installed; it needs a GPU "
            "and `pip install triton`; switch off the option of Megatron that uses it"
        )


def _jit(function: Any = None, **options: Any) -> Any:
    """Returns the kernel that `@triton.jit` or `@triton.jit(...)` declares."""
    return _jit if function is None else _Kernel(function.__name__)


def _decorator(*options: Any, **more: Any) -> Any:
    """Returns what `@triton.autotune(...)` and `@triton.heuristics(...)` do to a kernel here: nothing."""
    return lambda kernel: kernel


class _Name:
    """Stands for a name that a declaration of a kernel mentions: a type, a configuration."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _stand_ins() -> dict[str, ModuleType]:
    """Returns `triton` and `triton.language`, with what a declaration of a kernel names."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(triton).update(
        __version__="0", jit=_jit, autotune=_decorator, heuristics=_decorator, language=language
    )
    vars(language).update(__getattr__=_a_name)
    vars(triton).update(__getattr__=_a_name)
    return {"triton": triton, "triton.language": language}


def _a_name(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name


@contextlib.contextmanager
def _visible() -> Iterator[None]:
    """Context in which `import triton` finds the stand-in; modules that import each other nest."""
    if "triton" in sys.modules:
        yield
        return
    stand_ins = _stand_ins()
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)


class _Loader(importlib.abc.Loader):
    """Runs a module with the stand-in visible."""

    def __init__(self, plain: importlib.abc.Loader) -> None:
        self._plain = plain

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _visible():
            self._plain.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `NEEDS_TRITON` where Python would, and wraps their loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the wrapped spec of such a module, None for every other name."""
        if not name.startswith(NEEDS_TRITON):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec
