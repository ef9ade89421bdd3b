"""Masks on which the search of planner "auto" is tuned and judged; none is a cell of bench_plan.py.

Lengths, ranks, heads and seeds are others than those of the benchmark grid. The numbers of SearchBudget are set on
every second cell; the others say whether they hold. The local search was judged on all of them. Hubs are masks of which
few rows are seen by all ranks.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from megatron_cp import mask as masks
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.study.workloads import named_mask

K = 1 << 10
HEADS = ((16, 2), (40, 8), (24, 24), (48, 4), (12, 12), (20, 4))
SIZES = ((6, 48 * K), (12, 96 * K), (24, 192 * K), (32, 80 * K), (48, 384 * K), (4, 24 * K))
DOCUMENTS = (
    ("causal_document", "W1", 7),
    ("causal_document", "W2", 8),
    ("causal_document", "W3", 9),
    ("causal_document", "W4", 10),
    ("causal_document", "W5", 11),
    ("causal_document", "W8", 12),
    ("share_question", "W2", 5),
    ("mixed_document", "W1", 6),
    ("window_document", "W3", 5),
    ("full_document", "W4", 6),
    ("causal_blockwise", "W2", 3),
)
OTHERS: dict[str, Callable[[int], AttentionMask]] = {
    "causal": masks.causal,
    "full": masks.full,
    "prefix": lambda n: masks.prefix_lm(n, n // 5),
    "window": lambda n: masks.sliding_window(n, 3000),
    "window with 64 sinks": lambda n: masks.sliding_window(n, 1500, num_sink=64),
    "block sparse": lambda n: named_mask("uniform_block_sparse", n, seed=4),
    "variable block sparse": lambda n: named_mask("variable_block_sparse", n, seed=4),
    "strided": lambda n: named_mask("strided", n),
    "global and local": lambda n: named_mask("global_local", n),
    "star": lambda n: named_mask("star", n),
    "streaming": lambda n: named_mask("streaming", n),
    "global window": lambda n: named_mask("global_sliding_window", n, seed=3),
    "chunked": lambda n: masks.chunked_causal(n, 7000),
    "equal documents": lambda n: masks.documents([n // 16] * 16),
    "one giant document": lambda n: masks.documents([n // 2] + [n // 128] * 64),
}


@dataclass(frozen=True)
class SearchCell:
    """One mask on some ranks."""

    name: str
    ranks: int
    tokens: int
    heads: tuple[int, int]
    build: Callable[[], AttentionMask]

    def __str__(self) -> str:
        size = f"{self.ranks} ranks, {self.tokens // K}K"
        return f"{self.name}, {size}, {self.heads[0]}:{self.heads[1]}"


def search_cells() -> list[SearchCell]:
    """Returns all cells up to 48 ranks: four sizes of every kind of documents, three of every other mask."""
    heads, sizes = itertools.cycle(HEADS), itertools.cycle(SIZES)
    found = []
    for name, workload, seed in DOCUMENTS:
        for _ in range(4):
            ranks, tokens = next(sizes)
            build = _named(name, tokens, workload, seed)
            found.append(SearchCell(f"{name} {workload}", ranks, tokens, next(heads), build))
        next(heads)
    for name, rule in OTHERS.items():
        for _ in range(3):
            ranks, tokens = next(sizes)
            found.append(SearchCell(name, ranks, tokens, next(heads), _applied(rule, tokens)))
        next(heads)
        next(sizes)
    return found


def large_cells() -> list[SearchCell]:
    """Returns cells of 40 to 128 ranks, held out, and hubs on 64 to 256."""
    found = []
    for name, workload, ranks, tokens, heads in (
        ("causal_document", "W1", 96, 768 * K, (24, 24)),
        ("causal_document", "W3", 40, 512 * K, (16, 2)),
        ("causal_document", "W5", 128, 768 * K, (40, 8)),
        ("causal_document", "W4", 80, 384 * K, (12, 12)),
        ("share_question", "W4", 40, 256 * K, (24, 24)),
        ("prefix_lm_document", "W2", 56, 384 * K, (12, 12)),
    ):
        build = _named(name, tokens, workload, 22)
        found.append(SearchCell(f"{name} {workload}", ranks, tokens, heads, build))
    for name, ranks, tokens, heads in (
        ("causal", 96, 384 * K, (12, 12)),
        ("window", 96, 384 * K, (12, 12)),
        ("strided", 48, 384 * K, (24, 24)),
        ("block sparse", 40, 256 * K, (12, 12)),
        ("streaming", 128, 512 * K, (24, 24)),
        ("global and local", 72, 512 * K, (12, 12)),
        ("star", 40, 512 * K, (48, 4)),
        ("global window", 80, 384 * K, (20, 4)),
    ):
        build = _applied(OTHERS[name], tokens)
        found.append(SearchCell(name, ranks, tokens, heads, build))
    for ranks, heads in itertools.product((64, 128, 256), ((24, 24), (16, 2))):
        tokens = ranks * 4 * K
        for name, hub in (("1024 sinks", _sinks), ("2048 global tokens", _global_tokens)):
            found.append(SearchCell(name, ranks, tokens, heads, _applied(hub, tokens)))
    return found


def _named(name: str, tokens: int, workload: str, seed: int) -> Callable[[], AttentionMask]:
    return lambda: named_mask(name, tokens, workload=workload, seed=seed)


def _applied(rule: Callable[[int], AttentionMask], tokens: int) -> Callable[[], AttentionMask]:
    return lambda: rule(tokens)


def _sinks(tokens: int) -> AttentionMask:
    return masks.sliding_window(tokens, 1000, num_sink=1024)


def _global_tokens(tokens: int) -> AttentionMask:
    """Returns 2048 tokens that see all and are seen by all, and a window for the others."""
    first = 2048
    rows = [
        (0, first, 0, tokens, None, None),
        (first, tokens, 0, first, None, None),
        (first, tokens, first, tokens, -512, 512),
    ]
    return masks.from_slices(tokens, tokens, rows)
