"""A corpus of plans, small enough for every run of the tests, and what stands in them as one number each.

python -m tests.plan.golden     writes golden.json anew, after a change that is meant to change plans

The numbers do not cover the config, so that a new field of CPConfig leaves them as they are.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, KernelRates, Level, Topology
from megatron_cp.plan import PLANNERS, forget_plans, make_plans
from tests.plan.cases import packed

FILE = Path(__file__).with_name("golden.json")
K = 1 << 10

MASKS = {
    "causal": lambda: masks.causal(4 * K),
    "full": lambda: masks.full(3 * K),
    "prefix": lambda: masks.prefix_lm(4 * K, 700),
    "window": lambda: masks.sliding_window(6 * K, 500),
    "window with sinks": lambda: masks.sliding_window(5 * K, 300, num_sink=4),
    "dilated": lambda: masks.dilated(2 * K, 256, dilation=8),
    "chunked": lambda: masks.chunked_causal(5000, 700),
    "log-normal": lambda: packed("log-normal", 8 * K, 40),
    "one long": lambda: packed("one long", 8 * K, 60),
    "equal": lambda: packed("equal", 8 * K, 32),
    "uniform, full": lambda: packed("uniform", 7777, 23, within="full"),
    "log-normal, window": lambda: packed("log-normal", 8 * K, 30, 1, within=("window", 256)),
    "strided": lambda: masks.strided(2 * K, remapped=True),
    "star": lambda: masks.star(2 * K),
    "streaming": lambda: masks.streaming(4 * K),
    "questions": lambda: masks.shared_question([900, 2000, 1196]),
}
SIZES = ((2, 8, 8), (8, 8, 2), (16, 32, 8), (12, 24, 24))  # ranks, heads, key/value heads
UNEVEN = Topology("three to a node", 300.0, 250.0, 3, 200.0, 20.0, 5.0)
PODS = Topology(
    "pods", 300.0, 250.0, 2, 200.0, 20.0, 5.0, 0.1,
    outer_levels=(Level(4, 10.0), Level(8, 5.0)), nics_per_node=1,
)  # fmt: skip
RATES = ((100.0, 200.0), (250.0, 400.0))
MEASURED = Topology(
    "measured", 400.0, 400.0, 8, 300.0, 40.0, 15.0, 0.1,
    KernelRates((128, 4096), (128, 4096), (RATES, RATES), (RATES, RATES)),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call of make_plans."""

    masks: tuple[str, ...]
    ranks: int
    heads: tuple[int, int]
    options: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        options = ", ".join(f"{key}={_word(value)}" for key, value in self.options.items())
        return f"{' + '.join(self.masks)}; {self.ranks} ranks; {self.heads[0]}:{self.heads[1]}; {options}"

    def number(self) -> str:
        """Returns the number of the case's plans."""
        config = CPConfig(num_heads=self.heads[0], num_kv_heads=self.heads[1], **self.options)
        family = {name: (MASKS[name](), 1.0 + i) for i, name in enumerate(self.masks)}
        forget_plans()
        return "".join(number_of(plan) for plan in make_plans(family, self.ranks, config).values())


def cases() -> Iterator[Case]:
    """Yields the whole corpus."""
    for mask in MASKS:
        for ranks, *heads in SIZES:
            yield Case((mask,), ranks, tuple(heads))
    for mask in ("causal", "log-normal", "star", "window"):
        yield Case((mask,), 64, (32, 32))
        yield Case((mask,), 8, (8, 1), {"chunk_size": 64})
        yield Case((mask,), 16, (8, 8), {"chunk_size": 128, "token_multiple": 4})
        yield Case((mask,), 16, (8, 8), {"max_received_mb": 24})
        yield Case((mask,), 8, (4, 4), {"num_stages": 3})
        yield Case((mask,), 7, (5, 5), {"topology": UNEVEN})
        yield Case((mask,), 8, (8, 2), {"topology": MEASURED})
        yield Case((mask,), 4, (2, 1), {"topology": "a800", "head_dim": 64, "value_head_dim": 32})
        yield Case((mask,), 12, (12, 12), {"topology": PODS})
        yield Case((mask,), 8, (8, 2), {"rank_speeds": (1.0, 1.0, 0.5, 1.0, 1.0, 0.9, 1.0, 2.0)})
    yield Case(("log-normal", "log-normal, window"), 8, (8, 2))
    yield Case(("log-normal", "one long", "equal"), 16, (32, 32))
    for planner in sorted(set(PLANNERS) - {"auto"}):
        for mask, ranks in (("causal", 8), ("log-normal", 6), ("streaming", 16)):
            yield Case((mask,), ranks, (48, 48), {"planner": planner})


def number_of(plan) -> str:
    """Returns 16 digits over everything in a plan that decides the execution."""
    state = hashlib.sha256(plan.global_from_local.astype("<i8").tobytes())
    for pass_ in (plan.forward, plan.backward):
        state.update(f"{pass_.head_split}".encode())
        for stage in pass_.stages:
            state.update(f"{stage.keeps_k} {stage.keeps_q}".encode())
            for work in stage.work:
                state.update(f"{work.num_queries} {work.num_keys}".encode())
                state.update(work.array.astype("<i8").tobytes())
            for cast in (stage.k_cast, stage.q_cast):
                for hop in cast.hops if cast else ():
                    state.update(b"hop" + hop.messages.astype("<i8").tobytes())
                state.update(b"end")
    return state.hexdigest()[:16]


def _word(value: object) -> str:
    return value.name if isinstance(value, Topology) else str(value)


if __name__ == "__main__":
    numbers = {case.name: case.number() for case in cases()}
    FILE.write_text(json.dumps(numbers, indent=1) + "\n")
