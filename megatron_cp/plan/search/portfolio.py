"""What is searched for a family of masks: as they are, with classes of tokens put together, at every chunk size."""

from dataclasses import replace

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.placement.candidates import Family
from megatron_cp.plan.placement.classes import classes_together
from megatron_cp.plan.placement.placement import chunk_layout
from megatron_cp.plan.search.budget import SearchBudget
from megatron_cp.plan.search.candidate import Candidate
from megatron_cp.plan.search.looks import Looks
from megatron_cp.plan.search.search import Search

MANY_SLICES = 4096  # of a mask: merging neighbours takes a microsecond for each


def candidates(
    masks: Family, cp_size: int, config: CPConfig, budget: SearchBudget
) -> list[Candidate]:
    """Returns all placements looked at, with their priced options; each mask has at least one on each.

    A chosen chunk size is searched like each coarser one that is legal as well: no finer one does worse. Where classes
    of tokens never meet (a dilated window), their tokens are put together first; if that takes no more slices, nothing
    else is looked at.
    """
    masks = {name: (_merged(mask), weight) for name, (mask, weight) in masks.items()}
    apart = (
        classes_together([mask for mask, _ in masks.values()])
        if _may_reorder(cp_size, config)
        else None
    )
    found: list[Candidate] = []
    if apart is not None:
        weights = [weight for _, weight in masks.values()]
        reordered = dict(zip(masks, zip(apart.masks, weights, strict=True), strict=True))
        found += [
            replace(one, reordering=apart) for one in _searched(reordered, cp_size, config, budget)
        ]
        if _num_slices(reordered) <= _num_slices(masks):
            return found
    for chosen in _with_coarser_chunks(masks, cp_size, config):
        found += _searched(masks, cp_size, chosen, budget)
    return found


def _searched(
    masks: Family, cp_size: int, config: CPConfig, budget: SearchBudget
) -> list[Candidate]:
    return Search(Looks(masks, cp_size, config, budget), budget).run()


def _merged(mask: AttentionMask) -> AttentionMask:
    """Returns the mask with neighbours merged if it has so many slices that it may pay: a token each of a diagonal."""
    return mask.merged() if mask.num_slices > MANY_SLICES else mask


def _may_reorder(cp_size: int, config: CPConfig) -> bool:
    """Returns whether single tokens may be placed anywhere: not in chunks that the user chose."""
    return cp_size > 1 and config.chunk_size is None


def _num_slices(masks: Family) -> int:
    return sum(mask.num_slices for mask, _ in masks.values())


def _with_coarser_chunks(masks: Family, cp_size: int, config: CPConfig) -> list[CPConfig]:
    """Returns the config, and with a chosen chunk size those of 2, 4 ... times as many tokens that divide a rank's."""
    if config.chunk_size is None:
        return [config]
    chunk, count = chunk_layout(next(iter(masks.values()))[0].num_queries, cp_size, config)
    return [
        replace(config, chunk_size=chunk << n)
        for n in range(count.bit_length())
        if count % (1 << n) == 0
    ]
