"""What is particular to the models of one family of Hugging Face; the families themselves are in families.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_cp.models.hugging_face import settings as s
from megatron_cp.models.hugging_face.rows import (
    BEHIND_THE_OTHERS,
    HF_LAYERS,
    Piece,
    Place,
    Row,
    Shapes,
    pieces_of,
)

Tables = Mapping[Place, tuple[Row, ...]]


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A model for images too, whose language model is one of a family."""

    model_type: str
    names: tuple[tuple[str, str], ...]
    """How names of the language model's tensors begin there, and how by themselves."""
    images: tuple[str, ...]
    """How names of what is for images begin."""


def images_too(model_type: str) -> Wrapper:
    """Returns the usual wrapper: the language model as a part, beside one that sees."""
    names = (("model.language_model.", "model."),)
    return Wrapper(model_type=model_type, names=names, images=("model.visual.",))


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to the models of one `model_type`."""

    model_type: str
    architecture: str
    weights: Tables
    settings: tuple[s.Setting, ...]
    constants: Mapping[str, Any]
    """Arguments of Megatron-LM that every model of the family has."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json whose other values are not served; an absent key is none of them."""
    predictions_at: tuple[str, str] = BEHIND_THE_OTHERS
    """Where prediction layers have their norms and projection, and their layer."""
    layers_at: str = HF_LAYERS
    """How the names of layers' tensors begin, before the number of the layer."""
    always: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    """Keys of config.json that every model of the family has, besides those of its settings."""
    changes_nothing: frozenset[str] = frozenset()
    """Keys of config.json without effect on weights and on what they compute, in this family."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Keys of its config.json that have other names in the settings, and those."""
    wrapper: Wrapper | None = None
    """The models for images too, of which these are the language models."""
    alone: Family | None = None
    """As whose models these are written by themselves, where transformers has no class for them."""

    def settings_with(self, others: Mapping[s.Setting, s.Setting | None]) -> tuple[s.Setting, ...]:
        """Returns the settings with others in the place of some; None leaves one out."""
        found = (others.get(setting, setting) for setting in self.settings)
        return tuple(setting for setting in found if setting is not None)

    def pieces(
        self,
        arguments: dict[str, Any],
        *,
        by_layer: bool | None = None,
        shapes: Shapes | None = None,
    ) -> list[Piece]:
        """Returns every piece of a model of the family; arguments as in `pieces_of`."""
        pieces = pieces_of(
            self.weights,
            arguments,
            by_layer=by_layer,
            predictions_at=self.predictions_at,
            layers_at=self.layers_at,
            shapes=shapes,
        )
        return list(pieces)

    def first_prediction(self, arguments: dict[str, Any]) -> str:
        """Returns how the names of the first prediction layer's tensors begin."""
        return self.predictions_at[0].format(number=0, behind=arguments["num_layers"])
