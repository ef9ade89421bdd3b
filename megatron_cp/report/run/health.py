"""Is a run healthy: a verdict, and the reasons for it.

Every reason is a rule over what the run logged, so that two readers come to the same answer. Thresholds are
choices, not measurements: each stands beside its rule with what it separates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_cp.report.draw.svg import Markup, count_of, escape, plain, tag
from megatron_cp.report.run.record import LOSS, Run
from megatron_cp.training.logging.spikes import MIN_STEPS, SPIKE

State = Literal["well", "look", "ill"]
FloatArray = NDArray[np.float64]
WORDS: dict[State, str] = {"well": "Healthy", "look": "Worth a look", "ill": "Not healthy"}
_ORDER: tuple[State, ...] = ("well", "look", "ill")
SURE = 2.0  # standard errors between two means before one is called lower
GROWN = 3.0  # times the median of the run: above, the norm drifts and does not jump
WORSE = 1.01  # held-out loss over its best: below, it is within what other batches would say
MANY = 0.05  # of all steps skipped: loss scaling alone skips the first few


@dataclass(frozen=True)
class Reason:
    """One finding about a run."""

    state: State
    words: str


@dataclass(frozen=True)
class Verdict:
    """What the reasons come to: the worst of them."""

    reasons: tuple[Reason, ...]

    @property
    def state(self) -> State:
        """Returns the worst state."""
        return max((one.state for one in self.reasons), key=_ORDER.index, default="look")

    def markup(self) -> Markup:
        """Returns the box at the top of the page."""
        items = (tag("li", escape(one.words), class_=one.state) for one in self.reasons)
        return tag(
            "div",
            tag("b", escape(WORDS[self.state])),
            tag("ul", *items),
            class_=f"verdict {self.state}",
        )

    def lines(self) -> list[str]:
        """Returns the verdict as lines of a terminal, the worst reasons first."""
        ordered = sorted(self.reasons, key=lambda one: -_ORDER.index(one.state))
        return [WORDS[self.state], *(f"  {one.words}" for one in ordered)]


def verdict_of(run: Run) -> Verdict:
    """Returns the verdict; what was not logged is left out."""
    rules: tuple[Callable[[Run], Reason | None], ...] = (
        _loss, _held_out, _gradients, _skipped, _end,
    )  # fmt: skip
    found = (rule(run) for rule in rules)
    return Verdict(tuple(one for one in found if one is not None))


def tenth(values: FloatArray) -> int:
    """Returns how many values the first and the last tenth have."""
    return max(1, len(values) // 10)


def _values(run: Run, key: str) -> FloatArray:
    return np.array(run.column(key)[1], dtype=np.float64)


def _loss(run: Run) -> Reason | None:
    """Falling: the last tenth's mean is lower than the first's by more than chance makes it."""
    values = np.array(run.logged(LOSS)[1])
    broken = np.isnan(values)
    if broken[-tenth(values) :].any():
        steps = count_of(int(broken.sum()), "step")
        return Reason(
            "ill", f"the training loss was not finite in {steps} logged, the last ones among them"
        )
    values = values[~broken]
    if len(values) < MIN_STEPS:
        return Reason(
            "look", f"{count_of(len(values), 'step')} logged a loss; a trend needs {MIN_STEPS}"
        )
    count = tenth(values)
    first, last = values[:count], values[-count:]
    spread = float(np.std(np.diff(values)) / np.sqrt(2)) * np.sqrt(2 / count)
    fall = float(first.mean() - last.mean())
    said = f"{first.mean():.3f} to {last.mean():.3f} (mean of the first and the last {count_of(count, 'step')} logged)"
    if fall > SURE * spread:
        return Reason("well", f"training loss falls, {said}")
    if fall < -SURE * spread:
        return Reason("ill", f"training loss rises, {said}")
    return Reason("look", f"training loss does not move beyond its noise, {said}")


def _held_out(run: Run) -> Reason | None:
    """The gap to documents that are never trained on, and whether their loss has turned."""
    steps, losses = run.logged(run.held_out_loss)
    if not losses:
        return Reason("look", "no held-out loss was logged (--eval-interval)")
    if math.isnan(losses[-1]):
        return Reason("ill", f"held-out loss is not finite at step {steps[-1]:.0f}")
    best, when = int(np.nanargmin(losses)), steps[-1]
    trained, training = (np.array(one) for one in run.column(LOSS))
    gap = ""
    if len(training):  # the training loss has moved on where the evaluation is older than its end
        nearest = np.argsort(np.abs(trained - when), kind="stable")[: tenth(training)]
        away = losses[-1] - float(training[nearest].mean())
        gap = f"{abs(away):.3f} {'above' if away >= 0 else 'below'}"
        gap = f", {gap if abs(away) >= 0.0005 else 'as'} the training loss around step {when:.0f}"
    if losses[-1] > WORSE * losses[best]:
        return Reason(
            "look",
            f"held-out loss rises: {losses[-1]:.3f} after {losses[best]:.3f} at step {steps[best]:.0f}{gap}; "
            "the model memorises, or the learning rate is too high",
        )
    return Reason("well", f"held-out loss {losses[-1]:.3f}{gap}")


def _gradients(run: Run) -> Reason | None:
    values, broken = _values(run, "grad-norm"), int(_values(run, "grad/nonfinite").sum())
    if broken:
        return Reason("ill", f"the gradient norm was not finite in {count_of(broken, 'step')}")
    if len(values) < MIN_STEPS:
        return None
    middle, last = float(np.median(values)), float(np.median(values[-tenth(values) :]))
    settled = values[tenth(values) :]  # at the start gradients are large, and nothing is wrong
    spikes = int((settled > SPIKE * middle).sum())
    said = f"gradient norm {plain(last)} at the end, median {plain(middle)}"
    judged = ", of the steps logged" if run.interval > 1 else ""
    above = f"above {SPIKE:g} times the median after the first tenth{judged}"
    if last > GROWN * middle:
        return Reason("look", f"{said}: it grows")
    if spikes:
        return Reason("look", f"{said}; {count_of(spikes, 'step')} {above}")
    return Reason("well", f"{said}, no spikes {above}")


def _skipped(run: Run) -> Reason | None:
    values = _values(run, "grad/skipped")
    if not len(values):
        return None
    count = int(values.sum())
    if count == 0:
        return Reason("well", "no step was skipped")
    steps = len(values) * run.interval
    state: State = "ill" if count > MANY * steps else "look"
    return Reason(state, f"{count:,} of {count_of(steps, 'step')} were skipped")


def _end(run: Run) -> Reason:
    wanted = run.argument("train_iters")
    done = run.num_steps
    of = f" of {wanted}" if isinstance(wanted, int) else ""
    if not run.description.get("finished"):
        return Reason("look", f"not finished: {done}{of} steps")
    if isinstance(wanted, int) and done < wanted:
        return Reason("look", f"ended early, after {done}{of} steps")
    return Reason("well", f"all {count_of(done, 'step')} done")
