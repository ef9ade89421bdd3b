"""What would my data do on 8 to 4096 GPUs, and against which baseline: all planners at several rank counts.

Nothing here is measured: plans are made for real, their times come from the cost model and the event
simulation of a hardware row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.study.compare import Outcome, best_other, measured
from megatron_cp.report.draw.svg import plain
from megatron_cp.report.figures.planners import (
    LEGEND,
    machine_words,
    named,
    outcome_values,
    planner_lines,
)
from megatron_cp.report.figures.view import USUAL
from megatron_cp.report.sources import MaskChoice, Source, Tell, check_ranks, quiet

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """All planners at one number of ranks; the first that was asked for is ours."""

    cp_size: int
    mask: AttentionMask
    lengths: IntArray
    outcomes: tuple[Outcome, ...]

    @property
    def ours(self) -> Outcome:
        """Returns the outcome of the first planner that was asked for."""
        return self.outcomes[0]

    @property
    def best_other(self) -> Outcome | None:
        """Returns the fastest other planner, by prediction."""
        return best_other(self.outcomes, self.ours.planner)

    @property
    def usual(self) -> Outcome | None:
        """Returns what a user of Megatron-LM runs otherwise, where it was asked for and serves."""
        return named(self.outcomes, USUAL)


@dataclass(frozen=True)
class Study:
    """The answer: a step per number of ranks."""

    source: Source
    mask_name: str
    config: CPConfig
    seed: int
    steps: tuple[Step, ...]


def run_study(
    source: Source,
    choice: MaskChoice,
    sizes: Sequence[tuple[int, int]],
    config: CPConfig,
    planners: Sequence[str],
    *,
    seed: int = 0,
    tell: Tell = quiet,
) -> Study:
    """Returns every planner at each (ranks, tokens) of `sizes`; plans are kept of the fewest ranks.

    Raises ValueError for unknown masks and topologies, and for more ranks than tokens.
    """
    steps = []
    smallest = min(cp_size for cp_size, _ in sizes)  # pictures are drawn of it alone
    for cp_size, num_tokens in sizes:
        check_ranks(cp_size, num_tokens)
        lengths = choice.documents(num_tokens, source.documents(num_tokens, seed))
        mask = choice.build(num_tokens, lengths, seed)
        outcomes = []
        for number, name in enumerate(planners, 1):
            tell(f"{cp_size} ranks, planner {number} of {len(planners)}: {name}")
            wanted = replace(config, planner=name)
            if number > 1:  # the chunks are ours
                wanted = replace(wanted, chunk_size=None)
            one = measured(mask, cp_size, wanted)
            outcomes.append(one if cp_size == smallest else replace(one, plan=None))
        steps.append(Step(cp_size, mask, lengths, tuple(outcomes)))
    return Study(choice.seen_of(source), choice.words, config, seed, tuple(steps))


def study_text(study: Study) -> str:
    """Returns what the command prints: a table per number of ranks, fastest planner first."""
    lines = [
        f"SIMULATED, not measured: {machine_words(study.config)}",
        f"data: {study.source.words}; mask {study.mask_name}; seed {study.seed}",
        LEGEND,
    ]
    for step in study.steps:
        lines += ["", *_step_lines(step)]
    return "\n".join(lines)


def _step_lines(step: Step) -> list[str]:
    mask, served = step.mask, [one for one in step.outcomes if not one.refusal]
    first = (
        f"{step.cp_size} ranks, {mask.num_queries:,} tokens in {len(step.lengths):,} "
        f"document{'s' if len(step.lengths) > 1 else ''}, {mask.area():.4g} pairs (density {mask.density():.2g})"
    )
    first += f"; lower bound {plain(served[0].bound_ms, 4)} ms" if served else ""
    return [first, *planner_lines(step.ours, step.outcomes)]


def study_values(study: Study) -> dict[str, object]:
    """Returns the study as JSON values: figures alone, no plans."""
    steps = [
        {
            "ranks": step.cp_size,
            "tokens": step.mask.num_queries,
            "documents": len(step.lengths),
            "pairs": step.mask.area(),
            "planners": [outcome_values(one) for one in step.outcomes],
        }
        for step in study.steps
    ]
    return {
        "simulated": "times come from a model; nothing was measured",
        "data": study.source.words,
        "mask": study.mask_name,
        "seed": study.seed,
        "topology": asdict(get_topology(study.config.topology)),
        "heads": [study.config.num_heads, study.config.num_kv_heads, study.config.head_dim],
        "steps": steps,
    }
