"""Masks, lengths and configurations that the plan tests share."""

import numpy as np

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Topology
from megatron_cp.plan import make_plan

CP_SIZES = (1, 2, 3, 4, 8)
PLANNERS = (
    "allgather",
    "auto",
    "contiguous",
    "dcp",
    "distflashattn",
    "document_groups",
    "double_ring",
    "magi",
    "magi_hierarchical",
    "per_document_zigzag",
    "ring",
    "stripe",
    "ultraattn",
    "ulysses",
    "usp",
    "zigzag",
)
PRICED = (
    "allgather",
    "contiguous",
    "ring",
    "ulysses",
    "zigzag",
)  # those that "auto" weighs itself against
HEADS = 24  # every CP size divides it, so that ulysses serves them all


HEAD_COUNTS = [(8, 8), (8, 2), (8, 1)]  # of queries and keys: rho 1, 1/4, 1/8


def config(planner="auto", **options):
    """Returns a CPConfig under which every planner can serve every CP size of the tests."""
    options = {"num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": 64, **options}
    return CPConfig(planner=planner, **options)


def pack_lengths(kind, num_tokens, num_documents, seed):
    """Returns document lengths that fill a pack: log-normal, uniform, one long among many, equal."""
    rng = np.random.default_rng(seed)
    weights = {
        "log-normal": lambda: rng.lognormal(8, 1.6, num_documents),
        "uniform": lambda: rng.uniform(0.1, 2.0, num_documents),
        "one long": lambda: np.r_[num_documents, np.ones(num_documents - 1)],
        "equal": lambda: np.ones(num_documents),
    }[kind]()
    lengths = np.maximum(1, (weights / weights.sum() * num_tokens).astype(int))
    lengths[lengths.argmax()] += num_tokens - lengths.sum()
    return lengths


def packed(kind, num_tokens, num_documents, seed=0, within="causal"):
    """Returns the mask of a pack of such documents."""
    return masks.documents(pack_lengths(kind, num_tokens, num_documents, seed), within=within)


def scheme(planner, mask, cp_size, heads=(8, 8), **options):
    """Returns the plan of a scheme for these query and key/value heads, and rho."""
    options = config(planner, num_heads=heads[0], num_kv_heads=heads[1], **options)
    return make_plan(mask, cp_size, options), heads[1] / heads[0]


def nodes_of(size):
    """Returns a machine whose nodes hold `size` ranks."""
    return Topology(f"nodes of {size}", 300.0, 250.0, size, 200.0, 20.0, 5.0)
