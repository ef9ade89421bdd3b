"""What a checkpoint gave, in whichever format, before any of it is put into the run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_cp.training.checkpoint import names
from megatron_cp.training.checkpoint.compare import (
    Differences,
    check_model_fits,
    check_optimizer_fits,
    check_optimizer_kind,
    consequence,
    keeps_initial_values,
)
from megatron_cp.training.logging.lines import print_rank_0
from megatron_cp.training.run_state import RunState


@dataclass
class Content:
    """The parts of a checkpoint that the run asked for."""

    model: dict[str, dict[str, Any]]
    """State dicts by chunk: `model`, or `model0`, `model1`, ..."""
    entries: dict[str, Any]
    """What is equal on every rank: args, iteration, opt_param_scheduler, ..."""
    optimizer: Any = None
    shards: Any = None
    """The distributed optimizer's tensors in the format torch, on the first data-parallel rank."""
    random: dict[str, Any] | None = None


def judge(
    state: RunState,
    folder: object,
    model: Differences,
    optimizer: Differences | None,
    saved: object,
) -> None:
    """Tells how a checkpoint differs from the run, and refuses what is not allowed.

    Every rank calls it with the same differences, None where the optimizer's state is not wanted, and with the
    arguments that the checkpoint says it was `saved` with. Raises ValueError on every rank alike.
    """
    strictness = state.config.checkpoint.dist_ckpt_strictness
    for kind, differences in (("model", model), ("optimizer", optimizer)):
        for sentence in differences.sentences() if differences else ():
            print_rank_0(f" checkpoint and {kind} differ, {sentence}")
    check_model_fits(folder, model, strictness)
    if optimizer:
        check_optimizer_kind(folder, arguments_of(saved), state.config.arguments)
    if optimizer is not None:
        check_optimizer_fits(folder, optimizer, model)
    note = consequence(model, strictness)
    if note:
        print_rank_0(f" note: {note}")


def arguments_of(saved: object) -> dict[str, Any]:
    """Returns what the entry `args` of a checkpoint says; nothing where there is none."""
    return vars(saved) if isinstance(saved, Namespace) else {}


def note_what_stays(
    state: RunState, *, has_optimizer: bool, has_rerun: bool, extra_states: Collection[str]
) -> None:
    """Says in one line each what a checkpoint holds and this run does not take."""
    if has_rerun:
        print_rank_0(
            " note: the state of Megatron-LM's rerun machine is not loaded; there is none here"
        )
    if has_optimizer and not state.config.checkpoint.wants_optimizer:
        flag = "--finetune" if state.config.checkpoint.finetune else "--no-load-optim"
        print_rank_0(
            f" note: {flag}: the checkpoint's optimizer state is not loaded, and rates begin anew"
        )
    note = names.extra_state_note(extra_states)
    if note:
        print_rank_0(f" note: {note}")


def put_into_model(state: RunState, content: Content, chunks: dict[str, Any]) -> None:
    """Puts the weights into the model's chunks; `judge` has spoken before."""
    may_stay = keeps_initial_values(state.config.checkpoint.dist_ckpt_strictness)
    for name, chunk in chunks.items():
        found = chunk.load_state_dict(content.model[name], strict=False)
        missing = list(_weights(found.missing_keys))
        assert may_stay or not missing, missing
        assert not list(_weights(found.unexpected_keys)), found.unexpected_keys


def _weights(keys: list[str]) -> Iterator[str]:
    return (key for key in keys if not names.is_extra_state(key))
