"""What is compared before anything is written: the tensors that are there with those expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from megatron_cp.mcore.settings.mixers import linear_layers_of
from megatron_cp.models.hugging_face.refusal import ConversionError, refuse
from megatron_cp.models.hugging_face.rows import Piece, Source
from megatron_cp.models.hugging_face.safetensors_folder import SafetensorsReader, Specs, TensorInfo
from megatron_cp.models.hugging_face.settings import Arguments
from megatron_cp.models.hugging_face.torch_dist_folder import Stored, TorchDistReader

# What a training run keeps beside the weights; it has no counterpart in a Hugging Face folder.
_STATE_OF_A_RUN = (
    "optimizer.*",
    "chained_*",
    "opt_param_scheduler*",
    "rng_state*",
    "rerun_state_machine_state*",
    "*._extra_state*",
    "common_state*",
)


def check_sources(
    infos: Mapping[str, TensorInfo],
    pieces: Sequence[Piece],
    leave_out: Sequence[str],
    of_images: Sequence[str] = (),
) -> tuple[dict[str, torch.dtype], list[str]]:
    """Returns (type by Megatron's key, names left out as asked) of a Hugging Face folder.

    Names that begin as one of `of_images` are of tensors for images.

    Raises:
        ConversionError: listing every tensor that is missing, of another shape or type, or unknown.
    """
    reasons = []
    expected: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, set[torch.dtype | str]] = {}
    for piece in pieces:
        for source in piece.sources:
            names = (source.name, *(copy for copy in piece.copies if copy in infos))
            expected |= dict.fromkeys(names, source.whole)
            dtypes.setdefault(piece.keys[0], set()).update(
                infos[name].dtype for name in names if name in infos
            )
    for name, shape in expected.items():
        if name not in infos:
            reasons.append(
                f"{name} is missing; config.json asks for it in shape {list(shape)}; give the "
                "folder of a whole model"
            )
        elif infos[name].shape != shape:
            reasons.append(
                f"{name} has shape {list(infos[name].shape)}; config.json asks for {list(shape)}; "
                "give a config.json and weights of one model"
            )
        elif isinstance(infos[name].dtype, str):
            reasons.append(
                f"{name} has type {infos[name].dtype}; weights must be F64, F32, F16 or BF16; "
                "give an unquantised model"
            )
    mixed = {key: sorted(map(str, found)) for key, found in dtypes.items() if len(found) > 1}
    reasons += [
        f"{key} would be joined from tensors of types {found}; they must have one; cast them first"
        for key, found in mixed.items()
    ]
    left, unknown = _sort_out(sorted(set(infos) - set(expected)), leave_out)
    images = [name for name in unknown if name.startswith(tuple(of_images))]
    patterns = [f"{one}*" for one in of_images if any(name.startswith(one) for name in images)]
    if images:
        reasons.append(
            f"{', '.join(patterns)} ({len(images)} tensors) is for images, which are not trained here; give "
            f"--leave-out {' '.join(map(repr, patterns))} to convert the language model alone"
        )
    reasons += [
        f"{name} of shape {list(infos[name].shape)} is not part of this family's models; every "
        f"tensor must have a place; give --leave-out '{name}' to convert without it"
        for name in unknown
        if name not in images
    ]
    if reasons:
        raise ConversionError(reasons)
    return {key: _one(found) for key, found in dtypes.items()}, left


def with_stored_predictions(
    arguments: Arguments, names: Iterable[str], prefix: str, leave_out: Sequence[str]
) -> Arguments:
    """Returns the arguments without the prediction layers of config.json where no tensor under `prefix` is of them.

    Raises:
        ConversionError: for more than one, which no published model has, and for one that Megatron-Core builds
            otherwise.
    """
    count = arguments.get("mtp_num_layers")
    _, converted = _sort_out((name for name in names if name.startswith(prefix)), leave_out)
    if not converted:
        return arguments | ({"mtp_num_layers": None} if count else {})
    if count and count > 1:
        raise refuse(
            f"{count} layers of predictions in config.json are not served; at most 1 is: what a second one would read "
            f"of it is nowhere said; give --leave-out '{prefix}*' to convert without them"
        )
    if linear_layers_of(arguments)[-1]:
        raise refuse(
            f"the layer of predictions ({prefix}*) has softmax attention; Megatron-Core builds it as the last of the "
            f"model, which is linear; give --leave-out '{prefix}*' to convert without it"
        )
    return arguments


def images_of(reader: SafetensorsReader, of_images: Sequence[str]) -> Specs:
    """Returns shape and type of the tensors that are for images. Raises ConversionError for a type of none."""
    found = {}
    for name, info in reader.infos.items():
        if name.startswith(tuple(of_images)):
            if isinstance(info.dtype, str):
                raise refuse(f"{name} has type {info.dtype}; give an unquantised model")
            found[name] = (info.shape, info.dtype)
    return found


def check_copies(reader: SafetensorsReader, piece: Piece, value: torch.Tensor) -> None:
    """Refuses copies of a tensor that are other tensors: Megatron has one for all."""
    (source, *_) = piece.sources
    for name in (copy for copy in piece.copies if copy in reader.infos):
        if not torch.equal(reader.read(Source(name, source.shape, source.whole)), value):
            layer = name.split(".")[2]
            raise refuse(
                f"{name} differs from {source.name}; Megatron-Core's prediction layers share it with the model; give "
                f"--leave-out 'model.layers.{layer}.*' to convert without them"
            )


def check_copy_of_tied(reader: SafetensorsReader, left: Sequence[str]) -> None:
    """Refuses to leave out an output layer that is no copy of the embeddings, though config.json ties them."""
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    if output not in left:
        return
    infos = [reader.infos[name] for name in (embedding, output)]
    if len({(info.shape, info.dtype) for info in infos}) == 1:
        shape = infos[0].shape
        rows, copy = (reader.read(Source(name, shape, shape)) for name in (embedding, output))
        if torch.equal(rows, copy):
            return
    raise refuse(
        f"{output} differs from {embedding}, and config.json says tie_word_embeddings: transformers 5 computes with "
        "both, older ones with the embeddings alone; set tie_word_embeddings to false to keep it, or remove it from "
        "the files"
    )


def _one(found: set[torch.dtype | str]) -> torch.dtype:
    (dtype,) = found
    assert isinstance(dtype, torch.dtype)
    return dtype


def check_stored(
    reader: TorchDistReader, pieces: Sequence[Piece], leave_out: Sequence[str]
) -> tuple[list[Stored], list[str]]:
    """Returns (pieces with their keys and types, names left behind) of a Megatron checkpoint.

    State of a run is left behind and counted by kind, and what `leave_out` names.

    Raises:
        ConversionError: listing every tensor that is missing, of another shape, or unknown.
    """
    stored = []
    reasons = []
    for piece in pieces:
        key = next((key for key in piece.keys if key in reader.tensors), None)
        if key is None:
            reasons.append(
                f"{piece.keys[0]} is missing; the model's config.json asks for it; give the "
                "checkpoint and the config.json of one model"
            )
            continue
        entry = reader.tensors[key]
        found, expected = tuple(entry.size), (*piece.leading, *piece.shape)
        if not _fits(piece, found, expected):
            reasons.append(
                f"{key} has shape {list(found)}; the model's config.json asks for "
                f"{list(expected)}{' or more rows' if piece.row.padded else ''}; give the "
                "checkpoint and the config.json of one model"
            )
        stored.append((key, piece, entry.properties.dtype))
    used = {key for key, _, _ in stored}
    present = [*reader.tensors, *reader.objects]
    left, other = _sort_out(sorted(set(present) - used), leave_out)
    states, unknown = _sort_out(other, _STATE_OF_A_RUN)
    reasons += list(_unknown_lines(reader, unknown))
    if reasons:
        raise ConversionError(dict.fromkeys(reasons))
    return stored, left + _counted(states)


def _counted(names: Sequence[str]) -> list[str]:
    """Returns how many names each pattern of a run's state matches."""
    counts = [(sum(fnmatchcase(name, p) for name in names), p) for p in _STATE_OF_A_RUN]
    return [f"{pattern} ({count})" for count, pattern in counts if count]


def _fits(piece: Piece, found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Returns whether shapes are equal, but for rows of padding."""
    if piece.row.padded:
        return found[1:] == expected[1:] and found[0] >= piece.num_rows
    return found == expected


def _unknown_lines(reader: TorchDistReader, unknown: Iterable[str]) -> Iterator[str]:
    for key in unknown:
        entry = reader.tensors.get(key)
        shape = "an object" if entry is None else f"of shape {list(entry.size)}"
        yield (
            f"{key}, {shape}, is not part of this family's models; every tensor must have a place; "
            f"give --leave-out '{key}' to convert without it"
        )


def _sort_out(names: Iterable[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (names that a pattern matches, the others)."""
    found = list(names)
    left = [name for name in found if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return left, [name for name in found if name not in left]


def check_output(save: Path) -> None:
    """Refuses an output that is there."""
    if save.exists() or save.is_symlink():
        raise refuse(
            f"--save {save} exists; a conversion writes a new folder; give another name or remove "
            "it"
        )
