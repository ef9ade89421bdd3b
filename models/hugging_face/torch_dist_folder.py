"""A Megatron checkpoint folder in `torch_dist` format, written and read piece by piece.

    <root>/latest_checkpointed_iteration.txt      <root>/iter_0000001/.metadata, *.distcp
    <root>/hugging_face/                          <root>/iter_0000001/common.pt, metadata.json

The format is torch.distributed.checkpoint's: parts of tensors with their places, so any parallel
layout can load what one process wrote. Its storage writer asks for each piece when it is that
piece's turn, so no more than one is in memory; reading asks for the parts that cover one piece.
Neither needs a process group.
"""

from __future__ import annotations

import io
import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_cp.mcore.checkpoint.checkpoint_objects import COMMON_FILE, read_common, short_files
from megatron_cp.mcore.checkpoint.safe_load import read_index
from megatron_cp.mcore.settings.mixers import mamba_sizes
from megatron_cp.models.hugging_face.refusal import refuse
from megatron_cp.models.hugging_face.rows import Piece

TRACKER = "latest_checkpointed_iteration.txt"
CARRIED = "hugging_face"
# Megatron-Core's description of the format; 0.16 writes it, later versions still read it.
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
Stored = tuple[str, Piece, torch.dtype]
"""A piece under the key that it is stored under, and its type."""


class _PieceSaver(SavePlanner):
    """Gives the storage writer each piece when it asks for it."""

    def __init__(self, value_of: Callable[[MetadataIndex], torch.Tensor | io.BytesIO]) -> None:
        self.value_of = value_of

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the plan is made from pieces."""

    def create_local_plan(self) -> SavePlan:
        """Never asked: the plan is made from pieces."""
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Returns the metadata of the whole checkpoint."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Returns the piece's values."""
        return self.value_of(write_item.index)


def write_tensors(
    folder: Path,
    stored: Sequence[Stored],
    value_of: Callable[[Piece], torch.Tensor],
    *,
    max_file_bytes: int,
) -> None:
    """Writes every piece, in order, into files of about `max_file_bytes`, and their metadata."""
    piece_at: dict[tuple[str, torch.Size], Piece] = {}
    plans: list[list[WriteItem]] = [[*_empty_states(stored)]]
    filled = 0
    for key, piece, dtype in stored:
        item = _write_item(key, piece, dtype)
        num_bytes = piece.num_elements * dtype.itemsize
        if plans[-1] and filled + num_bytes > max_file_bytes:
            plans.append([])
            filled = 0
        plans[-1].append(item)
        filled += num_bytes
        assert item.index.offset is not None
        piece_at[key, item.index.offset] = piece

    def piece_value(index: MetadataIndex) -> torch.Tensor | io.BytesIO:
        if index.offset is None:
            return _empty_state()
        piece = piece_at[index.fqn, index.offset]
        return value_of(piece).reshape((1,) * len(piece.index) + piece.shape)

    planner = _PieceSaver(piece_value)
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    global_plans, metadata = planner.create_global_plan([SavePlan(items) for items in plans])
    # One plan per file, as if each came from a rank of its own.
    global_plans = writer.prepare_global_plan(global_plans)
    results = [writer.write_data(plan, planner).wait() for plan in global_plans]
    writer.finish(metadata, results)


def _write_item(key: str, piece: Piece, dtype: torch.dtype) -> WriteItem:
    offsets = torch.Size((*piece.index, *(0 for _ in piece.shape)))
    chunk = ChunkStorageMetadata(offsets, torch.Size((*(1 for _ in piece.index), *piece.shape)))
    return WriteItem(
        index=MetadataIndex(key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=dtype),
            size=torch.Size((*piece.leading, *piece.shape)),
        ),
    )


def _empty_states(stored: Sequence[Stored]) -> Iterator[WriteItem]:
    """Yields the objects without content that Megatron's linear layers look for beside weights."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    names: tuple[str, ...] = (
        "linear_",
        "in_proj",
        "out_proj",
        "eh_proj",
        "fc1_latent",
        "fc2_latent",
    )
    if any(key == "decoder.final_norm.weight" for key, _, _ in stored):  # a hybrid model's
        names += ("output_layer",)
    for key, piece, _ in stored:
        module, found, _ = key.partition(".weight")
        is_linear = module.rpartition(".")[2].startswith(names)
        index, sizes = piece.index or (0,), piece.leading or (1,)
        if found and is_linear and (module, index) not in seen:  # one for all sections of a weight
            seen.add((module, index))
            shard = f"{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"
            state = MetadataIndex(f"{module}._extra_state/shard_{shard}")
            yield WriteItem(index=state, type=WriteItemType.BYTE_IO)


def _empty_state() -> io.BytesIO:
    content = io.BytesIO()
    torch.save([None], content)
    return content


def write_common(folder: Path, arguments: Namespace) -> None:
    """Writes what Megatron keeps beside the tensors: arguments, counters, the format's name."""
    common = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": dict(CONTENT),
    }
    torch.save(common, folder / COMMON_FILE)
    (folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")


def checkpoint_folder(root: Path, iteration: int | None = None) -> Path:
    """Returns `<root>/iter_N` or `<root>/release`, as the tracker says or the iteration given.

    Raises:
        ConversionError: where there is no such folder, or no complete one.
    """
    if iteration is None:
        tracker = root / TRACKER
        if not tracker.is_file():
            raise refuse(
                f"{tracker} is missing; it names the newest checkpoint; give the folder that a "
                "training run saved into, or --ckpt-step"
            )
        said = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if said != "release" and not said.isdigit():
            raise refuse(
                f"{tracker} holds {said[:40]!r}; it must be an iteration or 'release'; write the "
                "number of a complete iter_ folder into it, or give --ckpt-step"
            )
        name = said if said == "release" else f"iter_{int(said):07d}"
    else:
        name = f"iter_{iteration:07d}"
    folder = root / name
    for file in (".metadata", "metadata.json"):
        if not (folder / file).is_file():
            raise refuse(
                f"{folder / file} is missing; a complete checkpoint in torch_dist format has it; "
                "give another --load or --ckpt-step"
            )
    return folder


def under_our_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a checkpoint as a run of ours names and completes them."""
    named = dict(saved)
    if "norm_epsilon" in named:  # Megatron-LM's name
        named.setdefault("layernorm_epsilon", named["norm_epsilon"])
    pattern = named.get("hybrid_layer_pattern") or named.get("hybrid_override_pattern")
    if pattern:  # the second is Megatron-LM's older name, and bars say where stages begin
        decoder, *predictions = pattern.split("/")
        named["hybrid_layer_pattern"] = decoder.replace("|", "")
        if (
            predictions
        ):  # their tensors have no place in a folder: they are refused or left out by name
            named["mtp_num_layers"] = None
        if named.get("mamba_head_dim"):  # heads need not be named
            named["mamba_num_heads"] = mamba_sizes(Namespace(**named)).num_heads
    return named


class TorchDistReader:
    """The tensors of a checkpoint, one piece at a time."""

    def __init__(self, folder: Path) -> None:
        """Reads the metadata; no tensor.

        Raises:
            ConversionError: for metadata that cannot be read, and files that are missing or too short.
        """
        self.folder = folder
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = read_index(folder / ".metadata")
            short = next(short_files(folder, self._metadata), None)
        except ValueError as problem:
            raise refuse(
                f"{folder / '.metadata'} cannot be read ({problem}); it must be the metadata of a "
                "torch_dist checkpoint; give another --ckpt-step"
            ) from None
        if short is not None:
            file, state, end = short
            raise refuse(
                f"{file} is {state}; .metadata says that it has at least {end} bytes; give another --ckpt-step"
            )
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        entries = self._metadata.state_dict_metadata
        self.tensors = {
            key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = sorted(set(entries) - set(self.tensors))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the run that wrote it, under our names; empty where it holds none."""
        try:
            common = read_common(self.folder, self._metadata)
        except ValueError as problem:
            line = (str(problem).splitlines() or [""])[0]
            raise refuse(
                f"the arguments of {self.folder} cannot be read ({line}); they must be as Megatron "
                "saves them; give another --ckpt-step"
            ) from None
        return under_our_names(vars(common["args"])) if "args" in common else {}

    def read(self, key: str, piece: Piece) -> torch.Tensor:
        """Returns the piece's tensor as it is stored, with every row of the vocabulary."""
        entry = self.tensors[key]
        num_leading = len(piece.index)
        shape = tuple(entry.size[num_leading:])
        target = torch.zeros((*(1 for _ in piece.index), *shape), dtype=entry.properties.dtype)
        wanted = ChunkStorageMetadata(
            torch.Size((*piece.index, *(0 for _ in shape))), torch.Size(target.shape)
        )
        items = create_read_items_for_chunk_list(key, entry, [wanted])
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != target.numel():
            raise refuse(
                f"{key} at {list(piece.index)} has {covered} of {target.numel()} elements in "
                f"{self.folder}; the checkpoint must hold all; give another --ckpt-step"
            )
        try:
            self._reader.read_data(LoadPlan(items), _PieceLoader(target)).wait()
        except Exception as problem:  # so does a damaged tensor
            line = (str(problem).splitlines() or [""])[0]
            raise refuse(
                f"{key} at {list(piece.index)} in {self.folder} cannot be read ({line}); the file "
                "is damaged; give another --ckpt-step"
            ) from None
        return target.reshape(shape)


class _PieceLoader(LoadPlanner):
    """Puts what the storage reader reads into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the plan is made from pieces."""

    def create_local_plan(self) -> LoadPlan:
        """Never asked: the plan is made from pieces."""
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Returns the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never asked: pieces are tensors."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Returns the part of the target that this item fills."""
        part = self.target
        for axis, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(axis, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the target holds it."""
