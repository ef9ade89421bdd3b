"""The two directions: what is read, checked, and written under a name that shows it incomplete.

Everything that can be known without reading a tensor is checked first; then pieces stream from one
side to the other, and the finished folder gets its name last.
"""

from __future__ import annotations

import itertools
import json
import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_cp.models.hugging_face import checks
from megatron_cp.models.hugging_face import safetensors_folder as hf
from megatron_cp.models.hugging_face import torch_dist_folder as megatron
from megatron_cp.models.hugging_face.config_file import (
    arguments_of,
    config_alone,
    config_of,
    disagreements,
    family_of,
    read_config,
    read_config_file,
)
from megatron_cp.models.hugging_face.families import FAMILIES
from megatron_cp.models.hugging_face.family import Family
from megatron_cp.models.hugging_face.refusal import ConversionError, refuse
from megatron_cp.models.hugging_face.rows import LAYERS, PREDICTIONS, Piece, Source
from megatron_cp.models.hugging_face.settings import Arguments

ITERATION = 1  # Megatron-LM refuses 0; the counters inside stand at 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to convert, and how."""

    load: Path
    save: Path
    make_vocab_size_divisible_by: int = 128
    transformer_engine: bool = False
    """Keys of Transformer Engine's layer specs, where they differ from the local ones."""
    leave_out: tuple[str, ...] = ()
    """Patterns of tensors that need no place on the other side."""
    ignored_keys: tuple[str, ...] = ()
    max_file_bytes: int = 5_000_000_000
    iteration: int | None = None
    hf_folder: Path | None = None
    """Where config.json and the tokenizer come from, for a checkpoint that does not carry them."""
    family: str | None = None
    """Whose config.json is recomputed where there is none."""
    show_progress: bool = True


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did."""

    arguments: Arguments
    num_tensors: int
    num_bytes: int
    left: tuple[str, ...]
    """Tensors and objects without a place on the other side, left behind knowingly."""
    carried: tuple[str, ...]
    left_files: tuple[str, ...]
    is_compared: bool = True
    """Whether config.json was compared with arguments of the run; a checkpoint may hold none."""


def to_megatron(request: Request) -> Report:
    """Returns a checkpoint in `torch_dist` format from a Hugging Face folder.

    Raises:
        ConversionError: with every reason; nothing is left of the output.
    """
    checks.check_output(request.save)
    config = read_config(request.load)
    family = family_of(config)
    arguments = arguments_of(
        config,
        make_vocab_size_divisible_by=request.make_vocab_size_divisible_by,
        ignored_keys=request.ignored_keys,
    )
    reader = hf.SafetensorsReader(request.load, family.wrapper.names if family.wrapper else ())
    arguments = checks.with_stored_predictions(
        arguments, reader.infos, family.first_prediction(arguments), request.leave_out
    )
    pieces = family.pieces(arguments, shapes=reader.shapes())
    of_images = family.wrapper.images if family.wrapper else ()
    dtypes, left = checks.check_sources(reader.infos, pieces, request.leave_out, of_images)
    checks.check_copy_of_tied(reader, left)
    name = -1 if request.transformer_engine else 0
    stored = [(piece.keys[name], piece, dtypes[piece.keys[0]]) for piece in pieces]
    with _written_aside(request.save) as root, _progress(request, stored) as progress:
        folder = root / f"iter_{ITERATION:07d}"
        folder.mkdir()

        def value_of(piece: Piece) -> torch.Tensor:
            parts = [reader.read(source) for source in piece.sources]
            checks.check_copies(reader, piece, parts[0])
            value = piece.joined(parts)
            progress.update(value.nbytes)
            return value

        weight_dtype = dtypes[pieces[0].keys[0]]
        common = _saved_arguments(request, arguments, weight_dtype)
        with _what_torch_cannot_write(request.save):
            megatron.write_tensors(folder, stored, value_of, max_file_bytes=request.max_file_bytes)
            megatron.write_common(folder, common)
        (root / megatron.CARRIED).mkdir()
        carried, left_files = hf.carry_files(request.load, root / megatron.CARRIED)
        _write_config(root / megatron.CARRIED, config_alone(family, config, arguments))
        (root / megatron.TRACKER).write_text(str(ITERATION), encoding="utf-8")
    return Report(
        arguments=arguments,
        num_tensors=len({name for name in reader.infos if name not in left}),
        num_bytes=progress.total,
        left=tuple(left),
        carried=tuple(carried),
        left_files=(*left_files, *reader.unread_files()),
    )


def to_hugging_face(request: Request) -> Report:
    """Returns a Hugging Face folder from a checkpoint in `torch_dist` format.

    Raises:
        ConversionError: with every reason; nothing is left of the output.
    """
    checks.check_output(request.save)
    folder = megatron.checkpoint_folder(request.load, request.iteration)
    reader = megatron.TorchDistReader(folder)
    saved = reader.arguments()
    source = request.hf_folder or request.load / megatron.CARRIED
    config = _config_for(request, source, saved)
    family = family_of(config)
    arguments = checks.with_stored_predictions(
        arguments_of(config, ignored_keys=request.ignored_keys),
        reader.tensors,
        PREDICTIONS,
        request.leave_out,
    )
    contradictions = disagreements(arguments, saved)
    if contradictions:
        raise ConversionError(
            f"{line}; both must describe one model; give --hf-folder with its config.json"
            for line in contradictions
        )
    whole = _model_for_images(source, family)
    by_layer = any(key.startswith(f"{LAYERS}self_attention.") for key in reader.tensors)
    pieces = family.pieces(arguments, by_layer=by_layer, shapes=whole.shapes() if whole else None)
    stored, left = checks.check_stored(reader, pieces, request.leave_out)
    specs, images = dict(_specs(stored)), {}
    if whole is not None and family.wrapper is not None:
        images = checks.images_of(whole, family.wrapper.images)
        specs = {whole.stored_name(name): spec for name, spec in specs.items()} | images
    carried: list[str] = []
    left_files: list[str] = []
    with _written_aside(request.save) as root, _progress(request, stored) as progress:
        shards = hf.plan_shards(specs, request.max_file_bytes)
        tensors = _tensors(reader, stored, progress)
        if whole is not None:
            config, tensors = read_config_file(source), _put_back(tensors, whole, images)
        hf.write_safetensors(root, tensors, specs, shards)
        if source.is_dir():
            carried, left_files = hf.carry_files(source, root)
        _write_config(root, _with_dtype(config, stored[0][2]))
    return Report(
        arguments=arguments,
        num_tensors=len(specs),
        num_bytes=progress.total,
        left=tuple(left),
        carried=tuple(carried),
        left_files=tuple(left_files),
        is_compared=bool(saved),
    )


def _model_for_images(folder: Path, family: Family) -> hf.SafetensorsReader | None:
    """Returns the model for images too whose language model is converted, where its files are in the folder."""
    wrapper = family.wrapper
    if wrapper is None or not (folder / "config.json").is_file():
        return None
    is_whole = read_config_file(folder).get("model_type") == wrapper.model_type
    return hf.SafetensorsReader(folder, wrapper.names) if is_whole else None


def _put_back(
    tensors: Iterator[tuple[str, torch.Tensor]], whole: hf.SafetensorsReader, images: hf.Specs
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a language model by their names in the whole one, and its others as they are."""
    for name, tensor in tensors:
        yield whole.stored_name(name), tensor
    for name, (shape, _) in images.items():
        yield name, whole.read(Source(name, shape, shape))


def _config_for(request: Request, source: Path, saved: Arguments) -> dict[str, Any]:
    """Returns config.json of the model: carried along, given, or made for a family that was named."""
    if request.family is None or (source / "config.json").is_file():
        if not (source / "config.json").is_file():
            raise refuse(
                f"{source / 'config.json'} is missing; it tells the family; give --hf-folder with "
                f"the model's files, or --family (one of {', '.join(FAMILIES)})"
            )
        config = read_config(source)
        if request.family not in (None, config.get("model_type")):
            raise refuse(
                f"--family {request.family} is not the model_type={config.get('model_type')!r} of "
                f"{source / 'config.json'}, which is used where it is; leave out --family, or remove the file"
            )
        return config
    family = FAMILIES[request.family]
    return config_of(family.alone or family, saved)


def _tensors(
    reader: megatron.TorchDistReader, stored: Sequence[megatron.Stored], progress: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields Hugging Face's tensors; one that several pieces make when the last of them has come."""
    for names, group in itertools.groupby(stored, lambda entry: _names(entry[1])):
        wholes: list[torch.Tensor] = []
        for key, piece, dtype in group:
            parts = piece.cut(reader.read(key, piece))
            progress.update(piece.num_elements * dtype.itemsize)
            at = piece.sources[0].at
            if at is None:
                yield from zip(names, parts, strict=True)
                yield from ((copy, parts[0]) for copy in piece.copies)
                continue
            if not wholes:
                wholes = [
                    part.new_zeros(source.whole)
                    for part, source in zip(parts, piece.sources, strict=True)
                ]
            for whole, part in zip(wholes, parts, strict=True):
                whole[at] = part
        yield from zip(names, wholes, strict=False)


def _names(piece: Piece) -> tuple[str, ...]:
    return tuple(source.name for source in piece.sources)


def _specs(
    stored: Sequence[megatron.Stored],
) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Yields name, shape and type of every tensor of Hugging Face, in the order of `_tensors`."""
    for _, piece, dtype in stored:
        for source in piece.sources:
            yield source.name, (source.whole, dtype)
        for copy in piece.copies:
            yield copy, (piece.sources[0].whole, dtype)


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes config.json, unless the one that was carried along says the same."""
    path = folder / "config.json"
    if not path.is_file() or read_config_file(folder) != config:
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")


def _with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns the configuration with the type that the weights have, wherever it is said."""
    name, inner = str(dtype).removeprefix("torch."), config.get("text_config")
    if inner is not None and {"dtype", "torch_dtype"} & inner.keys():
        config = {**config, "text_config": _with_dtype(inner, dtype)}
        if not {"dtype", "torch_dtype"} & config.keys():
            return config
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return config if config.get(key) == name else {**config, key: name}


_UNLESS_SAID = {
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "squared_relu": False,
    "rotary_seq_len_interpolation_factor": None,
}


def _saved_arguments(request: Request, arguments: Arguments, dtype: torch.dtype) -> Namespace:
    """Returns what loaders expect among a checkpoint's arguments, beside the model's own."""
    is_rope = arguments["position_embedding_type"] == "rope"
    layout = ("tensor_model", "pipeline_model", "context", "expert_model", "data")
    return Namespace(
        **{**_UNLESS_SAID, **arguments},
        **{f"{name}_parallel_size": 1 for name in layout},
        virtual_pipeline_model_parallel_size=None,
        world_size=1,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        seq_length=arguments["max_position_embeddings"],
        make_vocab_size_divisible_by=request.make_vocab_size_divisible_by,
        norm_epsilon=arguments["layernorm_epsilon"],
        add_position_embedding=True,
        use_rotary_position_embeddings=is_rope,
        apply_layernorm_1p=bool(arguments.get("layernorm_zero_centered_gamma")),
        apply_query_key_layer_scaling=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        ckpt_format="torch_dist",
        transformer_impl="transformer_engine" if request.transformer_engine else "local",
        tokenizer_type="HuggingFaceTokenizer",
    )


@contextmanager
def _written_aside(target: Path) -> Iterator[Path]:
    """Yields a new folder that becomes `target` at the end; after a failure nothing is left of it."""
    aside = target.with_name(f"{target.name}.unfinished")
    if aside.exists():  # a conversion that was killed leaves it
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


@contextmanager
def _what_torch_cannot_write(save: Path) -> Iterator[None]:
    """Raises ConversionError where torch could not write: of a full disk it makes a RuntimeError that names none."""
    try:
        yield
    except RuntimeError as problem:
        line = (str(problem).splitlines() or [""])[0]
        raise refuse(
            f"{save} could not be written ({line}); torch says so of a full disk: free space, or give another --save"
        ) from problem


@contextmanager
def _progress(request: Request, stored: Sequence[megatron.Stored]) -> Iterator[Any]:
    total = sum(piece.num_elements * dtype.itemsize for _, piece, dtype in stored)
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=request.save.name,
        disable=None if request.show_progress else True,
    ) as progress:
        yield progress
