"""What the state of Megatron's optimizers lacks for a run that is saved, loaded and goes on.

before the first step    SGD's rule by which its state begins
before a save            the state of parameters that were never updated; the padding that ends buckets
after a load             one step count for each group, where a checkpoint counts each parameter's
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_cp.mcore.versions.wrapping import put_hook


def install_first_momentum(optimizer: Any) -> None:
    """Gives Megatron's SGD the rule by which its state begins, without which no distributed checkpoint is loaded."""

    def begin(sgd: torch.optim.SGD, config: Any = None) -> None:
        for group in sgd.param_groups:
            for param in group["params"] if group["momentum"] else ():
                if "momentum_buffer" not in sgd.state[param]:
                    sgd.state[param]["momentum_buffer"] = torch.zeros_like(param)

    for part in parts_of(optimizer):
        if part.optimizer is not None:
            part.init_state_fn = begin


def parts_of(optimizer: Any) -> list[Any]:
    """Returns the optimizers that Megatron's ``optimizer`` is made of: experts may have one of their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def fill_missing_state(optimizer: Any) -> None:
    """Gives every parameter that was never updated the state that its first update would begin with.

    ``optimizer`` is Megatron's. A checkpoint needs the state of each parameter; with a loss scale the
    first steps may all be skipped. Left alone are optimizers that make their state themselves
    (`use_precision_aware_optimizer`) or that Megatron cannot begin (those on a CPU).
    """
    for part in parts_of(optimizer):
        has_rule = part.optimizer is not None and part.init_state_fn is not None
        if has_rule and not part.config.use_precision_aware_optimizer:
            part.init_state_fn(part.optimizer, part.config)


def adopt_parameter_steps(optimizer: Any) -> None:
    """Gives groups of parameters the step count that a loaded state has of each parameter.

    ``optimizer`` is Megatron's. torch's AdamW, which Megatron-LM takes without Transformer Engine and apex, counts
    steps for every parameter; ours, theirs and apex's for every group. Left there, bias would be corrected as in
    the first step (measured: loss off by 9e-2 two steps later).

    Raises:
        ValueError: if parameters have taken different numbers of steps.
    """
    for part in parts_of(optimizer):
        inner = part.optimizer
        if inner is None or isinstance(inner, torch.optim.Adam):  # counts for parameters itself
            continue
        counts = {int(state.pop("step")) for state in inner.state.values() if "step" in state}
        if len(counts) > 1:
            raise ValueError(
                f"its parameters have taken {min(counts)} to {max(counts)} steps; Adam has one number for all"
            )
        for count in counts:
            for group in inner.param_groups:
                if group.get("step", 0) not in (0, count):
                    raise ValueError(
                        f"a group has taken {group['step']} steps, its parameters {count}"
                    )
                group["step"] = count


def repair_padded_buckets() -> None:
    """Lets the distributed optimizer save its state by parameter where buckets end with padding.

    Before 0.20 Megatron-Core gathers the state without that padding, and cuts it by places that count it: under
    `fully_reshardable` each parameter behind a padded end was saved with values of its neighbours (measured on 0.16:
    the first loss of a resumed run 6.177 instead of 6.142). Ends are padded to multiples of 128 and of the ranks that
    share a bucket. A second call changes nothing.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def state_by_parameter(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _padding_gathered(self.buffers):
                return plain(self, *args, **kwargs)

        return state_by_parameter

    put_hook(DistributedOptimizer, "sharded_param_state_fully_reshardable", wrap)


@contextmanager
def _padding_gathered(buffers: Iterable[Any]) -> Iterator[None]:
    """Within the block Megatron takes the padding at the ends of buckets for values: it gathers that too."""
    padded = {buffer: buffer.numel for buffer in buffers}
    padded |= {bucket: bucket.grad_data.numel() for buffer in buffers for bucket in buffer.buckets}
    plain = {part: part.numel_unpadded for part in padded}
    for part, count in padded.items():
        part.numel_unpadded = count
    try:
        yield
    finally:
        for part, count in plain.items():
            part.numel_unpadded = count
