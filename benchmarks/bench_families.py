"""What layers of several masks pay for one placement, and what one mask gains as a family of two.

python benchmarks/bench_families.py --output benchmarks/results/families_<hardware>_<date>     two minutes

Times are predicted (forward plus backward of one layer, 32 query heads of 128, 8 key heads where a row names no
others, bf16, topology h100); they were measured nowhere. The second table is a fault finder: a mask alone and the same
mask twice have the same best plan, so where the family is faster the search of one mask has missed it. Its packs are
drawn at random.
"""

import itertools
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy

import numpy as np
from timing import Cell, Table, argument_parser, environment, publish

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import make_plan, make_plans
from megatron_cp.plan.hardware.makespan import layer_seconds
from megatron_cp.plan.study.compare import geometric_mean
from megatron_cp.plan.study.workloads import fitted

CONFIG = CPConfig(num_heads=32, num_kv_heads=8)
TOKENS_PER_RANK = 8192
RANKS = (8, 16, 24, 32, 64)
LAYERS = ((5, 1), (3, 1), (1, 1))  # under a window, in full
WINDOWS = (1024, 4096)
SEED, NUM_DRAWN = 20261125, 200


def pack(num_tokens: int, num_documents: int, seed: int) -> AttentionMask:
    """Returns causal documents of log-normal lengths."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 1.2, num_documents)
    lengths = np.maximum(1, drawn / drawn.sum() * num_tokens).astype(np.int64)
    return masks.documents(fitted(lengths, num_tokens))


def under(mask: AttentionMask, window: int) -> AttentionMask:
    """Returns a mask without the pairs that lie further apart."""
    return mask & masks.sliding_window(mask.num_queries, window)


def families() -> list[list[Cell]]:
    """Returns a row for each family: its layers together over each mask's layers at its own best."""
    rows: list[list[Cell]] = []
    for ranks, count, window, layers in itertools.product(RANKS, (20, 100), WINDOWS, LAYERS):
        full = pack(ranks * TOKENS_PER_RANK, count, ranks + count)
        family = {"window": (under(full, window), layers[0]), "full": (full, layers[1])}
        together = make_plans(family, ranks, CONFIG)
        ours = sum(layers * layer_seconds(together[name]) for name, (_, layers) in family.items())
        best = sum(
            layers * layer_seconds(make_plan(mask, ranks, CONFIG))
            for mask, layers in family.values()
        )
        name = f"{layers[0]}:{layers[1]}, window {window}, {count} documents, {ranks} ranks"
        rows.append([name, ours * 1e3, f"{ours / best:.3f}"])
    return rows


def drawn() -> list[list[Cell]]:
    """Returns a row for each pack: a mask alone, and over the same mask as a family of two."""
    draw = np.random.default_rng(SEED)
    rows: list[list[Cell]] = []
    for seed in range(NUM_DRAWN):
        ranks, count = int(draw.choice((4, 8, 16, 32))), int(draw.choice((2, 5, 20, 60, 200, 1000)))
        window, heads = int(draw.choice(WINDOWS)), int(draw.choice((8, 32)))
        mask = under(pack(ranks * TOKENS_PER_RANK, count, seed), window)
        config = CPConfig(num_heads=32, num_kv_heads=heads)
        alone = layer_seconds(make_plan(mask, ranks, config))
        twice = layer_seconds(make_plans({"a": (mask, 1), "b": (mask, 1)}, ranks, config)["a"])
        name = f"window {window}, {count} documents, {ranks} ranks, 32:{heads}"
        rows.append([name, alone * 1e3, f"{alone / twice:.3f}"])
    return rows


def summary(rows: list[list[Cell]]) -> str:
    """Returns the mean, the extremes and how many ratios exceed a hundredth."""
    ratios = [float(str(row[-1])) for row in rows]
    over = sum(ratio > 1.01 for ratio in ratios)
    return (
        f"{len(ratios)} rows: geometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}, worst "
        f"{max(ratios):.3f}, more than 1.01 in {over}."
    )


def main() -> None:
    """Prints the tables and writes them."""
    arguments = argument_parser(__doc__).parse_args()
    facts = environment() | {
        "what": "predicted times of plans; no GPU was used",
        "command": "python benchmarks/bench_families.py",
    }
    together, alone = families(), drawn()
    tables = [
        Table("Layers on one placement", ("family", "ms", "over each at its best"), together, summary(together)),
        Table("A mask alone over the same twice", ("mask", "ms", "over twice"), alone, summary(alone)),
    ]  # fmt: skip
    publish("Families", facts, tables, arguments.output)


if __name__ == "__main__":
    main()
