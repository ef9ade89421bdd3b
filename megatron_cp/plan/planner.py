"""make_plan: the mask and the rank count in, a validated plan out.

Planner "auto" takes the plan with the smallest predicted time from its portfolio (`plan/search/choose.py`);
the others emit one published scheme each. Equal inputs give equal bytes in every process.
"""

import difflib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Integral

import numpy as np

from megatron_cp.config import MAX_RANKS, CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.checks import as_array, check_mask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.attention_plan import AttentionPlan
from megatron_cp.plan.hardware.memory import received_bytes
from megatron_cp.plan.hardware.speeds import check_rank_speeds
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.placement import Placement, check_chunk_size
from megatron_cp.plan.placement.two_sided import KnownSides
from megatron_cp.plan.schema import PASSES, SIDES, PlanData, Side
from megatron_cp.plan.schemes.dcp import plan_dcp
from megatron_cp.plan.schemes.distflashattn import plan_distflashattn
from megatron_cp.plan.schemes.documents import plan_document_groups, plan_per_document_zigzag
from megatron_cp.plan.schemes.double_ring import plan_double_ring
from megatron_cp.plan.schemes.gather import (
    plan_allgather,
    plan_contiguous,
    plan_contiguous_cross,
)
from megatron_cp.plan.schemes.magi import plan_magi, plan_magi_hierarchical
from megatron_cp.plan.schemes.ring import plan_ring, plan_zigzag
from megatron_cp.plan.schemes.stripe import plan_stripe
from megatron_cp.plan.schemes.ultraattn import plan_ultraattn
from megatron_cp.plan.schemes.ulysses import plan_ulysses
from megatron_cp.plan.schemes.usp import plan_usp
from megatron_cp.plan.search.choose import best_family
from megatron_cp.plan.search.cross import best_cross
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.passes import needed_keys_pass
from megatron_cp.plan.validation import validate

MAX_PLANNED_TOKENS = 1 << 27  # their places alone are 1 GB
MAX_RECENT = 4  # families of plans kept, for masks that come again; a plan of 1M tokens holds 8 MB
_recent: OrderedDict[object, dict[str, AttentionPlan]] = OrderedDict()
_lock = threading.Lock()

Planner = Callable[[AttentionMask, int, CPConfig], PlanData]
CrossPlanner = Callable[[AttentionMask, int, CPConfig, KnownSides], PlanData]


def make_plan(
    mask: AttentionMask,
    cp_size: int,
    config: CPConfig | None = None,
    *,
    queries: AttentionPlan | None = None,
    keys: AttentionPlan | None = None,
) -> AttentionPlan:
    """Returns a validated plan for `mask` on `cp_size` ranks; pure, deterministic, no collective.

    Queries and keys of a square mask are the same tokens. A mask of another shape is one of cross attention: its keys
    are other tokens and have a placement of their own. So is a mask with `queries` or `keys`, plans in which these
    tokens have a placement already (of a decoder's and an encoder's self attention), which they keep.

    Raises ValueError for an empty mask, an unknown planner or topology, for a wish that the chosen planner cannot
    serve, and for `queries` or `keys` that do not fit the mask.
    """
    is_mask = isinstance(mask, AttentionMask)
    if queries is None and keys is None and not (is_mask and mask.num_queries != mask.num_keys):
        return make_plans({"mask": (mask, 1)}, cp_size, config)["mask"]
    started = time.perf_counter()
    config = config or CPConfig()
    _check_masks({"mask": (mask, 1)})
    cp_size = _checked_size(cp_size, config)
    plans: dict[Side, AttentionPlan | None] = {"q": queries, "k": keys}
    _check_cross(mask, cp_size, config, plans)
    placed = tuple(None if plan is None else plan.digest() for plan in plans.values())
    key = (mask.digest(), placed, cp_size, config)
    return _remembered(key, lambda: _make_cross(mask, cp_size, config, plans, started))["mask"]


def make_plans(
    masks: Mapping[str, tuple[AttentionMask, float]], cp_size: int, config: CPConfig | None = None
) -> dict[str, AttentionPlan]:
    """Returns one plan per mask, all with the same token placement, so layers of any kind can alternate.

    `masks` maps a name to (mask, number of layers that use it). The placement is chosen for the weighted
    sum of the predicted times. Raises as `make_plan`, and when the masks differ in length.
    """
    config = config or CPConfig()
    started = time.perf_counter()
    cp_size = _checked_size(cp_size, config)
    _check_inputs(masks, cp_size, config)
    key = (tuple((name, mask.digest(), w) for name, (mask, w) in masks.items()), cp_size, config)
    return _remembered(key, lambda: _make(masks, cp_size, config, started))


def _remembered(
    key: object, make: Callable[[], dict[str, AttentionPlan]]
) -> dict[str, AttentionPlan]:
    plans = _recent.get(key)
    if plans is None:
        plans = make()
    with _lock:  # threads may drop each other's
        _recent[key] = plans
        _recent.move_to_end(key)
        if len(_recent) > MAX_RECENT:
            _recent.popitem(last=False)
    return dict(plans)


def forget_plans() -> None:
    """Drops the plans kept for masks that come again; for measurements of planning."""
    _recent.clear()


def _make(
    masks: Mapping[str, tuple[AttentionMask, float]], cp_size: int, config: CPConfig, started: float
) -> dict[str, AttentionPlan]:
    known = replace(config, topology=get_topology(config.topology))  # looked up here, once
    if config.planner == "auto":
        plans = best_family(masks, cp_size, known)
    else:
        planner = PLANNERS[config.planner]
        plans = {name: planner(mask, cp_size, known) for name, (mask, _) in masks.items()}
        _check_one_placement(plans, config)
        _check_memory(plans, config)
    return _finished(plans, config, started)


def _finished(
    plans: Mapping[str, PlanData], config: CPConfig, started: float
) -> dict[str, AttentionPlan]:
    """Returns plans as users have them, validated, with the config as it was given."""
    for plan in plans.values():
        validate(plan)
    plan_ms = (time.perf_counter() - started) * 1e3 / len(plans)
    return {
        name: AttentionPlan.of(plan, config=config, plan_ms=plan_ms) for name, plan in plans.items()
    }


def _make_cross(
    mask: AttentionMask,
    cp_size: int,
    config: CPConfig,
    plans: Mapping[Side, AttentionPlan | None],
    started: float,
) -> dict[str, AttentionPlan]:
    known = {
        side: Placement.of_chunks(plan.tokens_of(side), chunk_size=1)
        for side, plan in plans.items()
        if plan is not None
    }
    resolved = replace(config, topology=get_topology(config.topology))
    made = {"mask": CROSS_PLANNERS[config.planner](mask, cp_size, resolved, known)}
    if config.planner != "auto":
        _check_memory(made, config)
    return _finished(made, config, started)


def _check_one_placement(plans: Mapping[str, PlanData], config: CPConfig) -> None:
    """Raises NotImplementedError when a scheme that looks at the mask places tokens differently for two."""
    first, *others = plans.items()
    for name, plan in others:
        if not np.array_equal(plan.global_from_local, first[1].global_from_local):
            raise NotImplementedError(
                f"planner={config.planner!r} places tokens by the mask, and differently for {first[0]!r} and {name!r}; "
                "masks of one family need one placement: use planner='auto', or a planner that looks at lengths only"
            )


def _check_memory(plans: Mapping[str, PlanData], config: CPConfig) -> None:
    """Raises ValueError when a scheme, which is what it is, holds more received rows than the limit allows."""
    if config.max_received_mb is None:
        return
    held = max(
        float(received_bytes(plan, name).max()) for plan in plans.values() for name in PASSES
    )
    if held > config.max_received_mb * 1e6:
        (planner,) = {plan.planner for plan in plans.values()}
        raise ValueError(
            f"max_received_mb={config.max_received_mb} cannot be kept by planner={planner!r}, which holds "
            f"{math.ceil(held / 1e6)} MB of received rows on a rank: raise it to that, take planner='auto', or plan "
            "for more ranks"
        )


def plan_auto(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns our plan: equal tokens, balanced area, needed keys only, overlapped as predicted best."""
    return best_family({"mask": (mask, 1)}, cp_size, config)["mask"]


def plan_on_placement(
    mask: AttentionMask, tokens: IntArray, config: CPConfig, planner: str = "fixed_placement"
) -> AttentionPlan:
    """Returns the plan for a given token placement (int64 `[P, T]`), needed keys only.

    For frameworks that have split their batch already, for instance Megatron's own zigzag. The plan keeps a copy of
    `tokens`, which may be anything that NumPy reads.

    Raises: ValueError unless they are 0 to P T - 1, each once, as many as the mask has or more, and where
    `max_received_mb` cannot be kept.
    """
    _check_masks({"mask": (mask, 1.0)})
    tokens = _as_placement(mask, tokens)
    _checked_size(len(tokens), replace(config, planner="auto") if config else config)
    both = needed_keys_pass(PlacedMask(mask, tokens))
    plan = PlanData(mask, config, planner, tokens, both, both)
    validate(plan)
    _check_memory({"mask": plan}, plan.config)
    return AttentionPlan.of(plan)


def _as_placement(mask: AttentionMask, tokens: object) -> IntArray:
    """Returns the tokens of each rank as int64 `[P, T]` of their own."""
    ids = as_array("tokens", tokens)
    if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
        raise ValueError(
            f"tokens have dtype {ids.dtype} and shape {ids.shape}; they must be integers [ranks, tokens], one "
            "of each at least"
        )
    if ids.size < mask.num_queries or (np.sort(ids, axis=None) != np.arange(ids.size)).any():
        raise ValueError(
            f"tokens of shape {ids.shape} must name each of 0 to {ids.size - 1} once, among them the "
            f"{mask.num_queries} of the mask; those beyond it are padding"
        )
    return ids.astype(np.int64)


def _check_masks(masks: object) -> None:
    """Raises TypeError unless `masks` maps names to (mask, weight), ValueError for more tokens than a plan can have."""
    if not isinstance(masks, Mapping):
        raise TypeError(f"masks={masks!r} must map names to (mask, layers); give a dict")
    for name, given in masks.items():
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int | float)):
            raise TypeError(
                f"masks[{name!r}]={given!r} must be (mask, number of layers that use it); give both"
            )
        check_mask(given[0], "mask" if name == "mask" else f"masks[{name!r}]")
        if given[0].num_queries > MAX_PLANNED_TOKENS:
            raise ValueError(
                f"a mask of {given[0].num_queries} tokens cannot be planned, at most {MAX_PLANNED_TOKENS} are allowed: "
                "a plan names the place of each; cut the pack"
            )


def _checked_size(cp_size: int, config: CPConfig) -> int:
    """Returns the number of ranks as an int, after a check of it and of the config."""
    is_number = isinstance(cp_size, Integral) and not isinstance(cp_size, bool)
    if not is_number or not 1 <= cp_size <= MAX_RANKS:
        raise ValueError(
            f"cp_size={cp_size!r} must be a positive integer of at most {MAX_RANKS}, the size of the context-parallel "
            "group; use 1 for a single rank"
        )
    if not isinstance(config, CPConfig):
        raise TypeError(f"config={config!r} must be a CPConfig; leave it out for the defaults")
    if config.planner not in PLANNERS:
        near = difflib.get_close_matches(str(config.planner), PLANNERS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"planner={config.planner!r} is unknown; choose one of {', '.join(sorted(PLANNERS))} "
            f"(nearest: {near})"
        )
    check_rank_speeds(config, int(cp_size))
    return int(cp_size)


def _check_inputs(
    masks: Mapping[str, tuple[AttentionMask, float]], cp_size: int, config: CPConfig
) -> None:
    _check_masks(masks)
    if not masks:
        raise ValueError("masks is empty; give at least one mask by name")
    grids = {name: (mask.num_queries, mask.num_keys) for name, (mask, _) in masks.items()}
    lengths = {size for grid in grids.values() for size in grid}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"mask grids {grids} must be square, of one length, with at least one token; "
            "crop or concat the masks to the tokens of one pack; the mask of cross attention has a plan of its own: "
            "make_plan(mask, cp_size, config, queries=plan)"
        )
    weights = {name: weight for name, (_, weight) in masks.items()}
    if not all(0 < weight < float("inf") for weight in weights.values()):
        raise ValueError(
            f"mask weights {weights} must be positive and finite: the number of layers that use each mask; "
            "leave out masks that no layer uses"
        )
    check_chunk_size(lengths.pop(), cp_size, config)


def _check_cross(
    mask: AttentionMask,
    cp_size: int,
    config: CPConfig,
    plans: Mapping[Side, AttentionPlan | None],
) -> None:
    """Raises TypeError, ValueError for a mask, config or plans of which no plan of cross attention can be made."""
    if config.planner not in CROSS_PLANNERS:
        raise ValueError(
            f"planner={config.planner!r} is for self attention; cross attention has planners "
            f"{', '.join(map(repr, CROSS_PLANNERS))}: use planner='auto', or a square mask"
        )
    for side, count in zip(SIDES, (mask.num_queries, mask.num_keys), strict=True):
        name, plan = ("queries", "keys")[side == "k"], plans[side]
        if not count:
            raise ValueError(
                f"the mask has {mask.num_queries} queries and {mask.num_keys} keys; there must be one of each at least"
            )
        if plan is None:
            check_chunk_size(count, cp_size, config)
        elif not isinstance(plan, PlanData):
            raise TypeError(
                f"{name}={plan!r} must be the plan in which these tokens have a placement"
            )
        elif (plan.cp_size, plan.length_of(side)) != (cp_size, count):
            raise ValueError(
                f"{name} is a plan of {plan.length_of(side)} tokens on {plan.cp_size} ranks, the mask has {count} "
                f"{name} on {cp_size}; give the plan of the tokens that are the {name}"
            )


CROSS_PLANNERS: dict[str, CrossPlanner] = {
    "auto": best_cross,
    "contiguous": plan_contiguous_cross,
}

PLANNERS: dict[str, Planner] = {
    "auto": plan_auto,
    "contiguous": plan_contiguous,
    "ring": plan_ring,
    "zigzag": plan_zigzag,
    "stripe": plan_stripe,
    "allgather": plan_allgather,
    "ulysses": plan_ulysses,
    "double_ring": plan_double_ring,
    "usp": plan_usp,
    "distflashattn": plan_distflashattn,
    "per_document_zigzag": plan_per_document_zigzag,
    "document_groups": plan_document_groups,
    "magi": plan_magi,
    "magi_hierarchical": plan_magi_hierarchical,
    "ultraattn": plan_ultraattn,
    "dcp": plan_dcp,
}
