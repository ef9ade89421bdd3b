"""Tables of weights, and the pieces they stand for: which tensors are joined, in which row order.

A row of a table names one tensor of Megatron and the tensors of Hugging Face that it is made of, or
rows of one. A piece is a row at one layer (and one expert): the unit that is read, joined or cut,
and written.

    joined = concatenate(parts, transposed where the table says so)[order]        to Megatron
    parts  = split(joined[inverse of order])                                      to Hugging Face

Shapes are in letters, those of sizes.py. One row order serves both directions, and no value is computed: a round trip
is exact. But for one weight (`less`), which Megatron stores less 1.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from megatron_cp.mcore.settings.layer_patterns import expert_layers, has_mlps
from megatron_cp.mcore.settings.mixers import (
    DELTA,
    KDA,
    MAMBA,
    SOFTMAX,
    layer_mixers_of,
    linear_layers_of,
)
from megatron_cp.mcore.settings.sparse_settings import is_sparse, layers_that_pick
from megatron_cp.models.hugging_face.orders import Sizes
from megatron_cp.models.hugging_face.sizes import Arguments, sizes_of

Place = Literal[
    "model", "layer", "index", "linear layer", "mamba layer", "dense layer", "expert layer", "expert", "stacked expert",
    "turned stacked expert", "prediction layer",
]  # fmt: skip
LAYERS = "decoder.layers."
PREDICTIONS = "mtp.layers."
HF_LAYERS = "model.layers."
BEHIND_THE_OTHERS = (f"{HF_LAYERS}{{behind}}.",) * 2
"""Where Hugging Face has a prediction layer's norms and projection, and its layer: as the layers behind the last."""
Axes = tuple[tuple[int, ...], tuple[int, ...]]
"""The places of a piece on the axes in front of it that number layers and experts, and their sizes."""
_NO_AXES: Axes = ((), ())
Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors by name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor of Megatron and the ones of Hugging Face that it is made of."""

    megatron: str
    hf: tuple[tuple[str, str], ...]
    """(name, shape in letters); `{e}` stands for the expert, without it experts are stacked."""
    rows: Callable[[Sizes], np.ndarray] | None = None
    """Which rows of its one tensor of Hugging Face these are; other rows of the table have the others."""
    less: float = 0.0
    """What Megatron's weights are less than Hugging Face's: norms that store theirs minus 1."""
    order: Callable[[Sizes], np.ndarray] | None = None
    """`joined[i]` is row `order[i]` of the concatenated parts; None keeps their order."""
    transposed: bool = False
    flat: bool = False
    """Hugging Face has axes of length 1 around the one axis."""
    padded: bool = False
    """Rows behind the last are zero, up to the padded vocabulary."""
    needs: tuple[str, bool] | None = None
    """An argument, and whether it must be set for the row to exist."""
    fused: str | None = None
    """Megatron's name where Transformer Engine's layer spec has another one."""
    copy: str | None = None
    """Under this name each prediction layer of Hugging Face stores its one tensor again; Megatron's share it."""


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor of Hugging Face, or what one piece has of it."""

    name: str
    shape: tuple[int, ...]
    """Of what the piece has."""
    whole: tuple[int, ...]
    """Of the tensor."""
    at: int | np.ndarray | None = None
    """The expert of a stacked tensor, or rows; None: all of it."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One row at its place: a tensor of Megatron, without the leading axes that number places."""

    row: Row
    keys: tuple[str, ...]
    """Names that Megatron may give it; the first is that of its local layer spec."""
    index: tuple[int, ...]
    """Layer and expert, as far as the tensor has an axis for them."""
    leading: tuple[int, ...]
    """Sizes of these axes."""
    sources: tuple[Source, ...]
    sizes: Sizes
    copies: tuple[str, ...] = ()
    """Names under which Hugging Face stores its one source again."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined tensor."""
        first = _turned(self.sources[0].shape, self.row)
        return (self.sizes["padded"] if self.row.padded else self.num_rows, *first[1:])

    @property
    def num_elements(self) -> int:
        """Elements of the joined tensor."""
        return math.prod(self.shape)

    @cached_property
    def num_rows(self) -> int:
        """Rows that come from Hugging Face."""
        return sum(_turned(source.shape, self.row)[0] for source in self.sources)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns Megatron's tensor of these parts, given in the order of `sources`."""
        turned = [part.t() if self.row.transposed else part for part in parts]
        if self.row.flat:
            turned = [part.flatten() for part in turned]
        whole = turned[0] if len(turned) == 1 else torch.cat(turned)
        if self.row.less:
            whole = whole - self.row.less
        if self.row.order is not None:
            whole = whole[torch.from_numpy(self.row.order(self.sizes))]
        if self.shape[0] > self.num_rows:
            padding = whole.new_zeros(self.shape[0] - self.num_rows, *self.shape[1:])
            whole = torch.cat([whole, padding])
        return whole.contiguous()

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of Hugging Face, in the order of `sources`: the inverse of `joined`."""
        whole = whole[: self.num_rows] + self.row.less if self.row.less else whole[: self.num_rows]
        if self.row.order is not None:
            whole = whole[torch.from_numpy(np.argsort(self.row.order(self.sizes)))]
        counts = [_turned(source.shape, self.row)[0] for source in self.sources]
        parts = whole.split(counts)
        if self.row.flat:
            pairs = zip(parts, self.sources, strict=True)
            return [part.reshape(source.shape) for part, source in pairs]
        return [(part.t() if self.row.transposed else part).contiguous() for part in parts]


def is_stacked_by_layer(arguments: Arguments) -> bool:
    """Whether Megatron stores a tensor of all layers as one, with an axis for the layer."""
    if any(linear_layers_of(arguments)) or arguments.get("hybrid_layer_pattern"):
        return False
    if is_sparse(Namespace(**arguments)) and not all(layers_that_pick(Namespace(**arguments))):
        return False
    return not arguments.get("num_experts") or arguments.get("moe_layer_freq", 1) == 1


def pieces_of(
    tables: Mapping[Place, tuple[Row, ...]],
    arguments: Arguments,
    *,
    by_layer: bool | None = None,
    predictions_at: tuple[str, str] = BEHIND_THE_OTHERS,
    layers_at: str = HF_LAYERS,
    shapes: Shapes | None = None,
) -> Iterator[Piece]:
    """Yields every piece of the model: outer ones, then layer by layer.

    Args:
        tables: the family's rows by place.
        arguments: Megatron-LM's arguments of the model.
        by_layer: whether tensors carry an axis for the layer; None as Megatron-Core would.
        predictions_at: where Hugging Face has prediction layers.
        layers_at: how it begins the names of the other layers' tensors, before the number.
        shapes: of the tensors of a Hugging Face folder, which tell whether a layer's experts are stacked there, and
            how; none are where they are unknown.
    """
    sizes, shapes = sizes_of(arguments), shapes or {}
    stacked = is_stacked_by_layer(arguments) if by_layer is None else by_layer
    num_layers, num_predictions = arguments["num_layers"], arguments.get("mtp_num_layers") or 0
    predictions = [
        tuple(at.format(number=number, behind=num_layers + number) for at in predictions_at)
        for number in range(num_predictions)
    ]
    for row in _rows(tables, "model", arguments):
        yield replace(
            _piece(row, "", "", sizes),
            copies=tuple(outer + row.copy for outer, _ in predictions if row.copy is not None),
        )
    for layer, parts in enumerate(_parts_of_layers(arguments)):
        prefix, axes = f"{LAYERS}{layer}.", _NO_AXES
        if stacked:
            prefix, axes = LAYERS, ((layer,), (num_layers,))
        places = (prefix, f"{layers_at}{layer}.")
        yield from _layer_pieces(tables, arguments, shapes, parts, places, axes)
    if "index" in tables and "index" not in parts:
        parts = [*parts, "index"]
    for number, (outer, inner) in enumerate(
        predictions
    ):  # whose layers are as the last one, with an index
        prefix = f"{PREDICTIONS}{number}."
        for row in _rows(tables, "prediction layer", arguments):
            yield _piece(row, prefix, outer, sizes)
        places = (f"{prefix}transformer_layer.", inner)
        yield from _layer_pieces(tables, arguments, shapes, parts, places, _NO_AXES)


_MIXERS: dict[str, Place] = {
    SOFTMAX: "layer",
    DELTA: "linear layer",
    KDA: "linear layer",
    MAMBA: "mamba layer",
}


def _parts_of_layers(arguments: Arguments) -> Iterator[list[Place]]:
    """Yields where each layer's rows stand: those of what mixes tokens, and those of the MLP."""
    settings = Namespace(**arguments)
    layers = zip(
        layer_mixers_of(arguments),
        has_mlps(arguments),
        expert_layers(arguments),
        layers_that_pick(settings),
        strict=True,
    )
    for mixer, has_mlp, is_expert, picks in layers:
        parts: list[Place] = [] if mixer is None else [_MIXERS[mixer]]
        if picks and is_sparse(settings):
            parts.append("index")
        if has_mlp:
            parts.append("expert layer" if is_expert else "dense layer")
        yield parts


def _layer_pieces(
    tables: Mapping[Place, tuple[Row, ...]],
    arguments: Arguments,
    shapes: Shapes,
    parts: Sequence[Place],
    prefixes: tuple[str, str],
    axes: Axes,
) -> Iterator[Piece]:
    """Yields the pieces of a layer: of what mixes tokens, and of the MLP. `prefixes` are Megatron's and theirs."""
    sizes = sizes_of(arguments)
    for part in parts:
        for row in _rows(tables, part, arguments):
            yield _piece(row, *prefixes, sizes, axes)
    if "expert layer" in parts:
        rows = _expert_rows(tables, arguments, shapes, prefixes[1])
        yield from _expert_pieces(rows, sizes, prefixes, axes)


def _expert_rows(
    tables: Mapping[Place, tuple[Row, ...]], arguments: Arguments, shapes: Shapes, hf_prefix: str
) -> list[Row]:
    """Returns the rows of a layer's experts: of stacked ones where they are stacked, turned where they lie turned."""
    sizes = sizes_of(arguments)
    stacked = _rows(tables, "stacked expert", arguments)
    found = [
        (shapes.get(hf_prefix + name), (sizes["E"], *(sizes[letter] for letter in text)))
        for row in stacked
        for name, text in row.hf
    ]
    if not any(shape for shape, _ in found):
        return _rows(tables, "expert", arguments)
    turned = _rows(tables, "turned stacked expert", arguments)
    is_turned = all(shape == (first, last, middle) for shape, (first, middle, last) in found)
    return turned if turned and is_turned else stacked


def _piece(row: Row, prefix: str, hf_prefix: str, sizes: Sizes, axes: Axes = _NO_AXES) -> Piece:
    return Piece(
        row=row,
        keys=_names(row, prefix),
        index=axes[0],
        leading=axes[1],
        sources=tuple(_source(row, hf_prefix + name, text, sizes) for name, text in row.hf),
        sizes=sizes,
    )


def _expert_pieces(
    rows: Sequence[Row], sizes: Sizes, prefixes: tuple[str, str], axes: Axes
) -> Iterator[Piece]:
    """Yields the pieces of one layer's experts; those of one stacked tensor follow each other."""
    prefix, hf_prefix = prefixes
    index, leading = axes
    for row in rows:
        for expert in range(sizes["E"]):
            yield Piece(
                row=row,
                keys=_names(row, f"{prefix}mlp.experts.experts."),
                index=(*index, expert),
                leading=(*leading, sizes["E"]),
                sources=tuple(
                    _source(
                        row,
                        f"{hf_prefix}{name.format(e=expert)}",
                        text,
                        sizes,
                        None if "{e}" in name else expert,
                    )
                    for name, text in row.hf
                ),
                sizes=sizes,
            )


def _source(row: Row, name: str, letters: str, sizes: Sizes, expert: int | None = None) -> Source:
    shape = tuple(sizes[letter] for letter in letters)
    if expert is not None:
        return Source(name, shape, (sizes["E"], *shape), expert)
    if row.rows is None:
        return Source(name, shape, shape)
    rows = row.rows(sizes)
    return Source(name, (len(rows), *shape[1:]), shape, rows)


def _rows(tables: Mapping[Place, tuple[Row, ...]], place: Place, arguments: Arguments) -> list[Row]:
    """Returns the rows of one place that exist under these arguments."""
    return [
        row
        for row in tables.get(place, ())
        if row.needs is None or bool(arguments.get(row.needs[0])) == row.needs[1]
    ]


def _names(row: Row, prefix: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in (row.megatron, row.fused) if name is not None)


def _turned(shape: tuple[int, ...], row: Row) -> tuple[int, ...]:
    if row.flat:
        return (math.prod(shape),)
    return shape[::-1] if row.transposed else shape
