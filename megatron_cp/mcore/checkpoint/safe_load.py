"""Reads files of a checkpoint that torch and Python would otherwise execute.

A pickle may call any function. Here it may name the few types that Megatron-LM's arguments and random
states are made of, and nothing else: any other name is refused before it is imported.

    .metadata                                   read_index
    common.pt, *.pt, objects inside *.distcp    load_trusted_types
    what Megatron-Core and torch read later     reading_safely
    one index that several ask for              parsing_each_index_once
"""

from __future__ import annotations

import argparse
import copy
import io
import os
import pathlib
import pickle
import signal
import types
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePath
from typing import Any, ClassVar

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron_cp.errors import DamagedCheckpointError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch reads it at every load


class ForeignCodeError(ValueError):
    """A file of a checkpoint asks for more than a checkpoint is made of."""


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


# Of these, what a pickle makes anew and then gives its state to.
_BUILT = frozenset(
    {
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        planner.BytesIOWriteData,
        planner.SavePlan,
        planner.TensorWriteData,
        planner.WriteItem,
    }
)


_CHOICES = "megatron.core.transformer.enums."  # values of arguments; each version has others


class UnknownChoice:
    """Stands for a member of an enumeration that another version of Megatron-Core has: nothing but its value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        """Returns the value in words."""
        return f"UnknownChoice({self.value!r})"


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


def trusting(choices: Sequence[str] = ()) -> AbstractContextManager[None]:
    """Returns a context in which `torch.load(weights_only=True)` takes the allowed types.

    `choices` are names of enumerations that `UnknownChoice` stands for. At the end torch forgets all of them, so what
    Megatron-Core told torch for good is not told again here.
    """
    known = torch.serialization.get_safe_globals()
    types_ = [*allowed_types(), *((UnknownChoice, name) for name in choices)]
    return torch.serialization.safe_globals([x for x in types_ if x not in known])


def load_trusted_types(
    path: Path | io.BytesIO, name: str | None = None, *, maps_tensors: bool = False
) -> Any:
    """Returns the content of a file that `torch.save` wrote, tensors on the CPU.

    With `maps_tensors` their values are read when they are looked at; torch before 1.6 wrote files that are read whole.
    Raises ValueError, naming the type, for a file that holds any type beside the allowed ones, and
    for a damaged file.
    """
    shown = name or str(path)
    maps = maps_tensors and isinstance(path, Path) and zipfile.is_zipfile(path)
    try:
        try:
            return _load(path, maps=maps)
        except Exception:
            choices = _unsafe_names(path)
            if not choices or not all(choice.startswith(_CHOICES) for choice in choices):
                raise
            return _load(path, choices, maps=maps)  # of another version of Megatron-Core
    except OSError as problem:
        raise DamagedCheckpointError(
            f"{shown} cannot be read ({problem.strerror}); give another --load"
        ) from None
    except Exception as problem:
        unsafe = _unsafe_names(path)
        if unsafe:
            raise ForeignCodeError(
                f"{shown} holds {', '.join(unsafe[:3])}; to read it would execute code of the file; "
                "this type is not among those of Megatron-LM's arguments; give another --load, or save the "
                "checkpoint again without it"
            ) from None
        text = " ".join(str(problem).split())[:160]
        raise DamagedCheckpointError(
            f"{shown} is damaged ({text}); load another checkpoint with --ckpt-step"
        ) from None


def _load(path: Path | io.BytesIO, choices: Sequence[str] = (), *, maps: bool = False) -> Any:
    with trusting(choices):
        if isinstance(path, io.BytesIO):
            path.seek(0)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=maps)


def _unsafe_names(path: Path | io.BytesIO) -> list[str]:
    """Returns the types in a file that are not allowed; nothing for a file that cannot be read."""
    try:
        with trusting():
            if isinstance(path, io.BytesIO):
                path.seek(0)
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        return []


class _IndexUnpickler(pickle._Unpickler):
    """Builds what an index is made of and nothing else: any other name is refused before it is imported.

    A pickle may also give state to what it names. Only to what it has made itself: the attributes of a type,
    a function or a member of an enumeration are the process's. Python's own unpickler, which can be asked,
    takes 2.3 times as long as the compiled one (4.2 s instead of 1.8 for 100,000 pieces, AMD EPYC, 2026-11-25).
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        """Gives state to an object. Raises _ForeignNameError for one that the pickle has not made."""
        target = self.stack[-2]
        if type(target) not in _BUILT:
            shared = target if isinstance(target, type) else type(target)
            raise _ForeignNameError(f"{shared.__module__} {shared.__name__} to change it")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        """Returns an allowed type. Raises _ForeignNameError for any other name."""
        if f"{module} {name}" not in _INDEX_NAMES:
            raise _ForeignNameError(f"{module} {name}")
        return super().find_class(module, name)


class _ForeignNameError(pickle.UnpicklingError):
    """A pickle names something that is no part of an index."""


def read_index(path: Path) -> Metadata:
    """Returns the index of a torch_dist checkpoint, `.metadata`, without executing anything of it.

    torch reads this file as a plain pickle. Nobody may change what is returned: others may hold it too.

    Raises:
        ForeignCodeError: it names a type that no index is made of, or a file outside of its folder.
        DamagedCheckpointError: it is cut or changed.
    """
    key = None if _parsed is None else _identity(path)
    if _parsed is None or key is None:
        return _parse_index(path)
    if key not in _parsed:
        _parsed.clear()
        _parsed[key] = _parse_index(path)
    return _parsed[key]


# The last index, by what tells its file from another one; None outside of `parsing_each_index_once`.
_parsed: dict[tuple[str | int, ...], Metadata] | None = None


@contextmanager
def parsing_each_index_once() -> Iterator[None]:
    """Within the block a file that has not changed since it was read and checked is not parsed again."""
    global _parsed
    before, _parsed = _parsed, {}
    try:
        yield
    finally:
        _parsed = before


def _identity(path: Path) -> tuple[str | int, ...] | None:
    """Returns what changes with a file's content; None where that cannot be told, and reading says why."""
    try:
        found = path.stat()
    except OSError:
        return None
    return str(path.absolute()), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _parse_index(path: Path) -> Metadata:
    """Returns what `read_index` does, and raises what it does."""
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except _ForeignNameError as foreign:
        raise ForeignCodeError(
            f"{path} names {foreign}, which is no part of a checkpoint's index; to read it would "
            "execute code of the file: give another --load"
        ) from None
    except OSError as problem:
        raise DamagedCheckpointError(
            f"{path} cannot be read ({problem.strerror}); give another --load"
        ) from None
    except Exception as problem:  # a damaged pickle raises nearly anything
        raise DamagedCheckpointError(
            f"{path} is damaged ({type(problem).__name__}); load another checkpoint with "
            "--ckpt-step, or the last good one with --ckpt-fallback"
        ) from None
    places = getattr(index, "storage_data", None)
    if not isinstance(index, Metadata) or not isinstance(places, dict):
        raise DamagedCheckpointError(
            f"{path} holds no index of a checkpoint; load another one with --ckpt-step, or the last "
            "good one with --ckpt-fallback"
        )
    for place in places.values():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or name != PurePath(name).name or name == "..":
            raise ForeignCodeError(
                f"{path} points at the file {str(name)[:80]!r}; it must lie in the same folder: give "
                "another --load"
            )
    return index


@contextmanager
def reading_safely() -> Iterator[None]:
    """Within the block torch and Megatron-Core read checkpoints without executing anything of them.

    Indices are read by `read_index`, every other pickle as `torch.load(weights_only=True)` reads it, with
    the allowed types, also where a caller asks torch for less.
    """
    original, before = FileSystemReader.read_metadata, os.environ.get(_FORCE)

    def read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        index = copy.copy(read_index(Path(self.path) / ".metadata"))
        index.storage_meta = copy.copy(index.storage_meta) or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index

    FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]
    os.environ[_FORCE] = "1"
    try:
        with trusting():
            yield
    finally:
        FileSystemReader.read_metadata = original  # type: ignore[method-assign]
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before
