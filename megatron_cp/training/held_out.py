"""The documents that are evaluated and never learned: which sets there are, and how many batches each is.

--eval-iters N           the first N batches of validation, and of the test
--full-validation        all of validation, every token once
--multiple-validation-sets      each corpus of validation by itself
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from megatron_cp.data.batch import PlanRequest
from megatron_cp.data.loader import PackedLoader
from megatron_cp.training import datasets
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.corpora import RunData, Split
from megatron_cp.training.logging.lines import print_rank_0


@dataclass(frozen=True)
class HeldOut:
    """A set of documents, under the name that its loss is logged by, and how many batches of it are evaluated."""

    name: str
    loader: PackedLoader
    num_batches: int


def held_out_sets(
    config: TrainConfig, data: RunData, request: PlanRequest, *, dp_rank: int, dp_size: int
) -> tuple[tuple[HeldOut, ...], HeldOut | None]:
    """Returns what is evaluated: the validation sets, and the test or None."""
    steps = config.steps
    load = partial(datasets.build_loader, config, request=request, dp_rank=dp_rank, dp_size=dp_size)
    wanted: list[Split] = ["valid"] if steps.eval_iters or steps.full_validation else []
    wanted += ["test"] if steps.eval_iters else []
    if empty := [name for name in wanted if data.splits[name] is None]:
        print_rank_0(f"> no token in {' and '.join(empty)}: nothing is evaluated there")
    valid: list[HeldOut] = []
    if "valid" in wanted and "valid" not in empty:
        for name, part in _validation_sets(data):
            loader = load(data=part, split="valid")
            valid.append(HeldOut(name, loader, _num_batches(config, loader)))
    if "test" not in wanted or "test" in empty:
        return tuple(valid), None
    return tuple(valid), HeldOut("test", load(data=data, split="test"), steps.eval_iters)


def _validation_sets(data: RunData) -> Iterator[tuple[str, RunData]]:
    """Yields each set's name in the log, and the data whose validation it is."""
    if not data.validation_sets:
        yield "validation", data
    for name in data.validation_sets:
        yield f"validation-{name}", data.of_validation_set(name)


def _num_batches(config: TrainConfig, loader: PackedLoader) -> int:
    """Returns how many batches of validation an evaluation takes."""
    if not config.steps.full_validation:
        return config.steps.eval_iters
    assert loader.num_batches is not None
    return loader.num_batches
