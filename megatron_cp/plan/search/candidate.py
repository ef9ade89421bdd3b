"""What a search has found: placements, the priced options on each, and how fast each is at a head degree."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.placement.classes import Reordering
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.price.head_groups import HeadGroups, PassOption, Strategy
from megatron_cp.plan.schema import Pass, PassName, PlanData
from megatron_cp.plan.search.strategies import StrategySource


@dataclass(frozen=True)
class Candidate:
    """A placement, and for every pass of every mask of the family the options found so far."""

    placement: Placement
    options: dict[tuple[str, PassName], list[PassOption]]
    reordering: Reordering | None = None
    """Of tokens; the placement is one of their new places."""

    @property
    def tokens(self) -> IntArray:
        """Returns the tokens of each rank: int64 `[P, T]`."""
        places = self.placement.tokens
        return places if self.reordering is None else self.reordering.tokens_of(places)

    def plan(
        self, mask: AttentionMask, config: CPConfig, forward: Pass, backward: Pass
    ) -> PlanData:
        """Returns the plan of a mask with these passes, forward and backward."""
        return PlanData(mask, config, "auto", self.tokens, forward, backward)

    def add(self, name: str, strategies: Iterable[Strategy]) -> None:
        """Adds strategies for a mask."""
        for strategy in strategies:
            for which, option in strategy.items():
                self.options[name, which].append(option)


@dataclass(frozen=True, eq=False)
class Trial:
    """A candidate at a head degree: where masks of a family did better at another before, at that as well."""

    candidate: Candidate
    degree: int
    groups: dict[str, list[HeadGroups]]
    """Of each mask."""
    priced: dict[StrategySource, float] = field(default_factory=dict)
    """The seconds of all masks by each source so far; infinite where it has nothing of use."""
    fastest: dict[str, float] = field(default_factory=dict)
    """The least seconds of each mask so far; missing before its first price."""
