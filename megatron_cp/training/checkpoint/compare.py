"""What a checkpoint holds against what a model wants: told in full, refused unless asked otherwise.

    only in the model        missing      its initial values would stay
    only in the checkpoint   unexpected   its values would be lost
    in both, other shape     reshaped     always refused

`--dist-ckpt-strictness` has Megatron-LM's values. Ours is `raise_all` where Megatron-LM's default,
`assume_ok_unexpected`, leaves out in silence what only the checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cp.training.checkpoint import names

Shape = tuple[int, ...]
_SHOWN = 6  # names of one kind in a refusal; more would bury the advice

# Megatron's words are those of the loader: "unexpected" is a request that the checkpoint cannot meet.
STRICTNESS = (
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
)
_KEEPS_INITIAL = frozenset(
    {"log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all"}
)


@dataclass(frozen=True)
class Differences:
    """Tensors by name, with the shape of the whole tensor."""

    missing: Mapping[str, Shape]
    unexpected: Mapping[str, Shape]
    reshaped: Mapping[str, tuple[Shape, Shape]]
    """In the checkpoint, in the model."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)

    def is_of_another_layout(self) -> bool:
        """Returns whether buckets of the distributed optimizer differ: each holds what one layout put into it."""
        return any(names.is_bucket(name) for name in (*self.unexpected, *self.reshaped))

    def sentences(self, at_most: int | None = None) -> list[str]:
        """Returns one sentence for each kind of difference, with the first names of each."""
        reshaped = [
            f"{name} {list(saved)} in the checkpoint, {list(wanted)} in the model"
            for name, (saved, wanted) in sorted(self.reshaped.items())
        ]
        kinds = {
            "not in the checkpoint": _with_shapes(self.missing),
            "only in the checkpoint": _with_shapes(self.unexpected),
            "of another shape": reshaped,
        }
        return [f"{kind}: {_listed(names, at_most)}" for kind, names in kinds.items() if names]


def compare(wanted: Mapping[str, Shape], saved: Mapping[str, Shape]) -> Differences:
    """Returns how the tensors that a model wants differ from those that a checkpoint holds."""
    return Differences(
        missing={name: wanted[name] for name in wanted.keys() - saved.keys()},
        unexpected={name: saved[name] for name in saved.keys() - wanted.keys()},
        reshaped={
            name: (saved[name], wanted[name])
            for name in wanted.keys() & saved.keys()
            if saved[name] != wanted[name]
        },
    )


def keeps_initial_values(strictness: str) -> bool:
    """Whether a model's tensor may keep its initial values where the checkpoint has none."""
    return strictness in _KEEPS_INITIAL


def leaves_out(strictness: str) -> bool:
    """Whether a tensor may be left out that only the checkpoint holds."""
    return strictness != "raise_all"


def check_model_fits(folder: object, model: Differences, strictness: str) -> None:
    """Raises ValueError for differences of the model that the strictness does not allow."""
    if (
        model.reshaped
        or (model.missing and not keeps_initial_values(strictness))
        or (model.unexpected and not leaves_out(strictness))
    ):
        told = "; ".join(model.sentences(_SHOWN))
        advice = "give the arguments it was saved with"
        if not model.reshaped:
            advice += f", or {_permission(model)}"
        raise ValueError(f"{folder} does not fit this model: {told}; {advice}")


def check_optimizer_fits(folder: object, optimizer: Differences, model: Differences) -> None:
    """Raises ValueError where an optimizer's state is not that of the run's.

    It must fit as a whole: its order is that of all parameters, so a part of it would meet the wrong ones.
    """
    if not model and optimizer.is_of_another_layout():
        raise ValueError(
            f"{folder} holds the optimizer's state in the buckets of another layout or precision; give the parallel "
            "sizes, and the --bf16 or --fp16, it was saved with (a run that saves with "
            "--dist-ckpt-optim-fully-reshardable may change them), or "
            "--no-load-optim to take the weights alone"
        )
    if optimizer or model:
        told = "; ".join((optimizer or model).sentences(_SHOWN))
        raise ValueError(
            f"{folder} holds the state of another optimizer or model ({told}); give "
            "--no-load-optim to take the weights alone, or --finetune to begin at iteration 0"
        )


def check_optimizer_kind(
    folder: object, saved: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    """Raises ValueError where a checkpoint's arguments say an optimizer with another state; names its flags.

    What they do not say is not asked.
    """
    was, now = saved.get("optimizer"), arguments["optimizer"]
    said, advice = [], []
    # Megatron-LM's dist_muon is muon, which has no shards.
    if was is not None and was.removeprefix("dist_") != now:
        said.append(f"with --optimizer {was}")
        advice.append(f"give --optimizer {was}")
    sharded = saved.get("use_distributed_optimizer")
    if now != "muon" and sharded is not None and sharded != arguments["use_distributed_optimizer"]:
        word, verb = ("with", "give") if sharded else ("without", "drop")
        said.append(f"{word} --use-distributed-optimizer")
        advice.append(f"{verb} --use-distributed-optimizer")
    if said:
        raise ValueError(
            f"{folder} was saved {' and '.join(said)}; {' and '.join(advice)}, or give --no-load-optim to go on with a "
            "fresh optimizer"
        )


def another_optimizer(folder: object, difference: object) -> ValueError:
    """Returns the refusal of an optimizer's state that is not that of the run's optimizer."""
    return ValueError(
        f"{folder} holds the state of another optimizer: {difference}; give the arguments it was saved with, or "
        "--no-load-optim"
    )


def consequence(model: Differences, strictness: str) -> str:
    """Returns what happens to tensors that are not exchanged, as a note; empty without any."""
    effects = []
    if model.missing:
        effects.append(f"{len(model.missing)} tensors keep their initial values")
    if model.unexpected:
        effects.append(f"{len(model.unexpected)} tensors of the checkpoint are left out")
    return f"--dist-ckpt-strictness {strictness}: {', '.join(effects)}" if effects else ""


def _permission(model: Differences) -> str:
    """Returns the flags that let these differences through, and what they do."""
    value = "log_all" if model.missing else "raise_unexpected"
    effects = ["keeps initial values where the checkpoint has none"] if model.missing else []
    effects += ["leaves out what only the checkpoint holds"] if model.unexpected else []
    return (
        f"--dist-ckpt-strictness {value} with --finetune or --no-load-optim, which "
        f"{' and '.join(effects)}"
    )


def _with_shapes(tensors: Mapping[str, Shape]) -> list[str]:
    return [f"{name} {list(shape)}" for name, shape in sorted(tensors.items())]


def _listed(names: list[str], at_most: int | None) -> str:
    """Returns the first names, and how many there are beside them."""
    if at_most is None or len(names) <= at_most:
        return ", ".join(names)
    return f"{', '.join(names[:at_most])} and {len(names) - at_most} more"
