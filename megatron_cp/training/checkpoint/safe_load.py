"""Reads files of a checkpoint that torch and Python would otherwise execute.

A pickle may call any function. Here it may name the few types that Megatron-LM's arguments and random
states are made of, and nothing else: any other name is refused before anything is built.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import pickletools
import signal
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

# What torch's own index of a torch_dist checkpoint is made of.
_INDEX_NAMES = frozenset(
    {
        "collections OrderedDict",
        "pathlib PosixPath",
        "pathlib._local PosixPath",
        "torch Size",
        "torch.serialization _get_layout",
    }
    | {
        f"torch.distributed.checkpoint.filesystem {name}"
        for name in ("_StorageInfo", "_StoragePrefix")
    }
    | {
        f"torch.distributed.checkpoint.metadata {name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    }
    | {
        f"torch.distributed.checkpoint.planner {name}"
        for name in (
            "BytesIOWriteData",
            "SavePlan",
            "TensorWriteData",
            "WriteItem",
            "WriteItemType",
        )
    }
    | {f"torch {name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
)


def allowed_types() -> list[Any]:
    """Returns the types that Megatron-LM's arguments, random states and counters are made of."""
    from megatron.core.enums import ModelType
    from megatron.core.rerun_state_machine import RerunDiagnostic, RerunMode, RerunState
    from megatron.core.transformer import enums

    numbers = [np.ndarray, np.dtype, type(np.dtype("uint32")), type(np.dtype("float64"))]
    numbers += [type(np.dtype(name)) for name in ("int64", "float32", "int32", "bool")]
    reconstruct = np.ndarray.__reduce__(np.zeros(1))[0]
    scalar = np.float64(0.0).__reduce__()[0]
    layers = [
        vars(enums)[name] for name in ("AttnBackend", "CudaGraphScope") if hasattr(enums, name)
    ]
    plain = [
        argparse.Namespace,
        types.SimpleNamespace,
        io.BytesIO,
        pathlib.PosixPath,
        signal.Signals,
    ]
    rerun = [RerunDiagnostic, RerunMode, RerunState]
    numpy_functions = [reconstruct, scalar]
    # Both spellings of NumPy's module: a checkpoint may be older or newer than the NumPy that reads it.
    spellings = [
        (function, f"numpy.{core}.multiarray.{function.__name__}")
        for function in numpy_functions
        for core in ("core", "_core")
    ]
    return [*plain, ModelType, *layers, *rerun, *numbers, *numpy_functions, *spellings]


def trusting() -> AbstractContextManager[None]:
    """Returns a context in which `torch.load(weights_only=True)` takes the allowed types.

    At its end torch forgets them, so what Megatron-Core told torch for good is not told again here.
    """
    known = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([x for x in allowed_types() if x not in known])


def load_trusted_types(path: Path | io.BytesIO, name: str | None = None) -> Any:
    """Returns the content of a file that `torch.save` wrote, tensors on the CPU.

    Raises ValueError, naming the type, for a file that holds any type beside the allowed ones, and
    for a damaged file.
    """
    shown = name or str(path)
    try:
        with trusting():
            if isinstance(path, io.BytesIO):
                path.seek(0)
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as problem:
        raise ValueError(
            f"{shown} cannot be read ({problem.strerror}); give another --load"
        ) from None
    except Exception as problem:
        unsafe = _unsafe_names(path)
        if unsafe:
            raise ValueError(
                f"{shown} holds {', '.join(unsafe[:3])}; to read it would execute code of the file; "
                "this type is not among those of Megatron-LM's arguments; give another --load, or save the "
                "checkpoint again without it"
            ) from None
        text = " ".join(str(problem).split())[:160]
        raise ValueError(
            f"{shown} is damaged ({text}); load another checkpoint with --ckpt-step"
        ) from None


def _unsafe_names(path: Path | io.BytesIO) -> list[str]:
    """Returns the types in a file that are not allowed; nothing for a file that cannot be read."""
    try:
        with trusting():
            if isinstance(path, io.BytesIO):
                path.seek(0)
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        return []


def check_index(path: Path) -> None:
    """Raises ValueError if the index of a torch_dist checkpoint would execute anything when it is read.

    torch reads `.metadata` as a plain pickle. Its opcodes are walked here, not run.
    """
    try:
        names = list(_named_globals(path.read_bytes()))
    except OSError as problem:
        raise ValueError(
            f"{path} cannot be read ({problem.strerror}); give another --load"
        ) from None
    except Exception as problem:
        raise ValueError(
            f"{path} is damaged ({type(problem).__name__}); load another checkpoint with --ckpt-step"
        ) from None
    for name in names:
        if name not in _INDEX_NAMES:
            raise ValueError(
                f"{path} names {name}, which is no part of a checkpoint's index; to read it would "
                "execute code of the file: give another --load"
            )


def _named_globals(content: bytes) -> Iterator[str]:
    """Yields `module name` of everything that a pickle would import; a name that is computed is `?`."""
    memo: dict[int, str | None] = {}
    strings: list[str | None] = [None, None]  # what the last two operations pushed
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument)
            strings.append(None)
        elif opcode.name == "STACK_GLOBAL":
            module, name = strings[-2:]
            yield f"{module} {name}" if module and name else "?"
            strings.append(None)
        elif opcode.name.startswith("EXT"):
            yield "?"
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = strings[-1]
        elif opcode.name.endswith("PUT"):
            memo[int(str(argument))] = strings[-1]
        elif opcode.name.endswith("GET"):
            strings.append(memo.get(int(str(argument))))
        else:
            strings.append(argument if isinstance(argument, str) else None)
