"""A Hugging Face folder: safetensors in one file or in shards, and the files beside them.

Reading opens one shard at a time and takes tensors out of it one by one; writing puts each tensor
into its file as it comes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_cp.models.hugging_face.refusal import listing, refuse
from megatron_cp.models.hugging_face.rows import Source

try:
    import safetensors
except ImportError as problem:
    raise ImportError(
        "safetensors is not installed; reading and writing Hugging Face weights needs it; "
        "pip install 'megatron_cp[hugging_face]'"
    ) from problem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Weights in any format, and what belongs to them alone; everything else at the top is carried.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    """As text where it is none that a model is trained in."""
    file: str


class SafetensorsReader:
    """The tensors of a folder, one at a time."""

    def __init__(self, folder: Path, names: Sequence[tuple[str, str]] = ()) -> None:
        """Reads every header; no tensor. Of `names` are how names begin in the files, and how they begin here instead.

        Raises:
            ConversionError: for missing, damaged and contradicting files.
        """
        self.folder = folder
        self.infos: dict[str, TensorInfo] = {}
        if (folder / ADAPTER).is_file():
            raise refuse(
                f"{folder} holds {ADAPTER}, with which transformers and peft compute another model than "
                "that of the weights; merge the adapter into them (merge_and_unload of peft), or remove it"
            )
        index = _read_index(folder)
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            self.infos |= _header(folder / file)
        if index is not None:
            _check_index(folder, index, self.infos)
        self._names = names
        self._call_by_the_model()
        self._open: tuple[str, Any] | None = None

    def _call_by_the_model(self) -> None:
        """Gives tensors of a language model the names that they have by themselves."""
        renamed = {
            name: next(
                (new + name[len(old) :] for old, new in self._names if name.startswith(old)), name
            )
            for name in self.infos
        }
        counts = Counter(renamed.values())
        if twice := sorted(
            name for name, new in renamed.items() if name != new and counts[new] > 1
        ):
            raise refuse(
                f"{self.folder} holds {listing(twice)} under another name too ({renamed[twice[0]]}); they may be two "
                "models: remove the one that is not meant"
            )
        self._stored_names = {new: name for name, new in renamed.items()}
        self.infos = {renamed[name]: info for name, info in self.infos.items()}

    def stored_name(self, name: str) -> str:
        """Returns a tensor's name in the files, also of one that they do not hold."""
        of_whole = (old + name[len(new) :] for old, new in self._names if name.startswith(new))
        return self._stored_names.get(name) or next(of_whole, name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each tensor."""
        return {name: info.shape for name, info in self.infos.items()}

    def unread_files(self) -> list[str]:
        """Returns the names of files of weights that no tensor is read from."""
        used = {info.file for info in self.infos.values()}
        return sorted(
            path.name for path in self.folder.glob("*.safetensors") if path.name not in used
        )

    def read(self, source: Source) -> torch.Tensor:
        """Returns the tensor, or what the piece has of it."""
        file = self.infos[source.name].file
        if self._open is None or self._open[0] != file:
            self._open = (file, safetensors.safe_open(self.folder / file, framework="pt"))
        handle, name = self._open[1], self._stored_names[source.name]
        if isinstance(source.at, int):
            return handle.get_slice(name)[source.at]
        whole = handle.get_tensor(name)
        return whole if source.at is None else whole[torch.from_numpy(source.at)]


def _read_index(folder: Path) -> dict[str, str] | None:
    """Returns the file of each tensor, as the index says; None where one file holds them all."""
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return None
        raise refuse(
            f"{folder} holds neither {SINGLE} nor {INDEX}; the weights must be in safetensors; "
            "save the model with transformers' save_pretrained"
        )
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        index = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as problem:
        raise refuse(
            f"{folder / INDEX} cannot be read ({problem!r}); it must be JSON with a weight_map; "
            "download it again"
        ) from None
    outside = sorted({file for file in index.values() if Path(file).name != file})
    if outside:
        raise refuse(
            f"{folder / INDEX} names {listing(outside)}; files must lie beside it, by their names alone; "
            "download it again"
        )
    if (folder / SINGLE).is_file() and set(index.values()) != {SINGLE}:
        raise refuse(
            f"{folder} holds {SINGLE}, which transformers would read alone, and {INDEX}, which names other files; "
            "they may be two models: remove the one that is not meant"
        )
    absent = sorted({file for file in index.values() if not (folder / file).is_file()})
    if absent:
        raise refuse(
            f"{folder} lacks {listing(absent)}; {INDEX} names them; download the missing files"
        )
    return index


def _check_index(folder: Path, index: dict[str, str], infos: dict[str, TensorInfo]) -> None:
    """Refuses an index and files that do not hold the same tensors."""
    wrong = [name for name, file in index.items() if name not in infos or infos[name].file != file]
    wrong += [name for name in infos if name not in index]
    if wrong:
        raise refuse(
            f"{folder / INDEX} and the files contradict each other about {listing(wrong)}; every "
            "tensor must be in the file that the index names; download the folder again"
        )


def _header(path: Path) -> dict[str, TensorInfo]:
    """Returns every tensor of a file."""
    try:
        with safetensors.safe_open(path, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(
                    tuple(part.get_shape()),
                    DTYPES.get(part.get_dtype(), part.get_dtype()),
                    path.name,
                )
                for name, part in slices.items()
            }
    except (safetensors.SafetensorError, OSError) as problem:
        raise refuse(
            f"{path} of {path.stat().st_size} bytes cannot be read ({problem}); it must be a whole "
            "safetensors file; download it again"
        ) from None


Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each tensor that is to be written, in the order in which they come."""


@dataclass(frozen=True)
class Shard:
    """One file to be written and the tensors that go into it."""

    file: str
    names: tuple[str, ...]


def plan_shards(specs: Specs, max_bytes: int) -> list[Shard]:
    """Returns shards of at most `max_bytes` (a larger tensor gets its own), in the order given."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name in specs:
        num_bytes = _num_bytes(*specs[name])
        if groups[-1] and filled + num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += num_bytes
    if len(groups) == 1:
        return [Shard(SINGLE, tuple(groups[0]))]
    return [
        Shard(f"model-{place:05d}-of-{len(groups):05d}.safetensors", tuple(names))
        for place, names in enumerate(groups, start=1)
    ]


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], specs: Specs, shards: list[Shard]
) -> None:
    """Writes the tensors, which come in the order of `shards`, and the index of several.

    Each tensor goes to its place in the file as it comes: the library would hold a whole shard,
    and a second time as bytes.
    """
    stream = iter(tensors)
    for shard in shards:
        header, start_of = _layout({name: specs[name] for name in shard.names})
        with (folder / shard.file).open("wb") as file:
            file.write(header)
            for expected in shard.names:
                name, tensor = next(stream)
                assert (name, tensor.shape, tensor.dtype) == (expected, *specs[expected])
                file.seek(start_of[name])
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        where = {name: shard.file for shard in shards for name in shard.names}
        total = sum(_num_bytes(*spec) for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _layout(specs: Specs) -> tuple[bytes, dict[str, int]]:
    """Returns (everything before the tensors, where each begins in the file) of the safetensors format.

    Eight bytes with the length of a JSON header, the header, then tensors without gaps; those of
    wider types stand first, so that each is aligned.
    """
    names = {dtype: text for text, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(specs, key=lambda name: (-specs[name][1].itemsize, name)):
        shape, dtype = specs[name]
        start, end = end, end + _num_bytes(shape, dtype)
        entries[name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + entries[name]["data_offsets"][0] for name in specs}


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def carry_files(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Copies what stands beside the weights; returns (names copied, names of other things left behind)."""
    copied, left = [], []
    for path in sorted(source.iterdir()):
        is_weight = path.name.endswith((*_WEIGHT_SUFFIXES, ".index.json"))
        if is_weight and path.suffix in (".safetensors", ".json"):
            continue
        if path.is_dir() or is_weight or path.name.startswith("."):
            left.append(path.name)
            continue
        shutil.copyfile(path, target / path.name)
        copied.append(path.name)
    return copied, left
