"""The page of one plan: its mask, who owns and who computes what, and what travels, beside other plans of the mask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_cp.plan import AttentionPlan
from megatron_cp.report.draw.html import Section, page, row, write_page
from megatron_cp.report.draw.svg import Markup, tag
from megatron_cp.report.figures.packs import communication_figure, dispatch_figure, mask_figure
from megatron_cp.report.figures.view import view_of_pack
from megatron_cp.report.figures.workers import workers_figure


@dataclass(frozen=True)
class PlanPage:
    """A page of pictures; a notebook shows it where it stands last in a cell."""

    content: Markup

    def write(self, path: str | Path) -> Path:
        """Writes one offline file and returns its path. Raises ValueError beyond draw.html.MAX_PAGE_BYTES."""
        write_page(Path(path), self.content)
        return Path(path)

    def _repr_html_(self) -> str:
        return tag("iframe", srcdoc=self.content, width="100%", height=980, title="a plan")


def plan_page(plan: AttentionPlan, *others: AttentionPlan) -> PlanPage:
    """Returns the page of a plan; `others`, plans of the same mask, stand beside it as baselines."""
    size = f"{plan.num_tokens:,} tokens"
    if plan.key_tokens is not None:
        size = f"{plan.num_tokens:,} queries and {plan.mask.num_keys:,} keys"
    title = f"{size} on {plan.cp_size} ranks, planner {plan.planner}"
    sections = [Section("plan", "The plan", draw_plan(plan, *others))]
    subtitle = "counted from the plan; nothing was measured"
    return PlanPage(page(title, subtitle, sections, {"plan digest": plan.digest()[:16]}))


def draw_plan(plan: AttentionPlan, *others: AttentionPlan) -> list[Markup]:
    """Returns the figures of `plan_page` as HTML, a row each."""
    pack = view_of_pack([plan, *others])
    rows = [row(mask_figure(pack), dispatch_figure(pack))]
    workers = workers_figure(pack)
    if workers is not None and plan.cp_size > 1:
        rows.append(row(workers))
    return [*rows, row(communication_figure(pack))] if plan.cp_size > 1 else rows
