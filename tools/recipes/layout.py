"""How the ranks of a recipe shrink to a few, and its pipeline stages with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_cp.training.arguments.stages import stages_of
from tools.recipes.command_line import CommandLine

_TENSOR = "--tensor-model-parallel-size"
_PIPELINE = "--pipeline-model-parallel-size"
_CONTEXT = "--context-parallel-size"
_EXPERT = "--expert-model-parallel-size"
_EXPERT_TENSOR = "--expert-tensor-parallel-size"
_WRITTEN_OUT = "--pipeline-model-parallel-layout"
_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
_STAGES = "--num-virtual-stages-per-pipeline-rank"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
_INSTANCES = "--num-distributed-optimizer-instances"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How many ranks share what."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        names = {"tp": self.tensor, "pp": self.pipeline, "cp": self.context, "dp": self.data}
        names |= {"ep": self.expert, "etp": self.expert_tensor}
        return " ".join(f"{name}{size}" for name, size in names.items() if size > 1) or "one rank"


def ranks_of(line: CommandLine) -> Ranks:
    """Returns the sizes that a recipe names; replicas are not among them."""
    tensor = line.number(_TENSOR, 1)
    return Ranks(
        tensor=tensor,
        pipeline=line.number(_PIPELINE, 1),
        context=line.number(_CONTEXT, 1),
        expert=line.number(_EXPERT, 1),
        expert_tensor=line.number(_EXPERT_TENSOR, tensor),
    )


def fit(wanted: Ranks, most: int, *, is_pipeline_inside: bool = False) -> Ranks:
    """Returns sizes that `most` ranks can hold; the largest is halved until they fit.

    Replicas are added only where the experts need them, and kept out otherwise.

    Args:
        wanted: the recipe's sizes.
        most: ranks that there are.
        is_pipeline_inside: whether ranks are numbered by stage before replica; the experts of a stage
            then lie on all its ranks.
    """
    sizes = {"tensor": wanted.tensor, "pipeline": wanted.pipeline, "context": wanted.context}
    while math.prod(sizes.values()) > most:
        largest = max(sizes, key=lambda name: sizes[name])
        sizes[largest] //= 2
    found = replace(wanted, **sizes, data=1)
    if is_pipeline_inside and found.pipeline > 1:
        stage = found.tensor * found.context
        expert = min(found.expert, stage)
        return replace(found, expert=expert, expert_tensor=stage // expert)
    found = replace(found, expert_tensor=min(found.expert_tensor, found.tensor))
    while True:
        for data in range(1, most // found.world_size + 1):
            stage = found.tensor * found.context * data
            if stage % (found.expert * found.expert_tensor) == 0:
                return replace(found, data=data)
        if found.expert >= found.expert_tensor:
            found = replace(found, expert=found.expert // 2)
        else:
            found = replace(found, expert_tensor=found.expert_tensor // 2)


def cut_layout(line: CommandLine, most: int, context: int | None = None) -> Ranks:
    """Cuts the parallel sizes to `most` ranks; `context` replaces the recipe's own size."""
    wanted = ranks_of(line)
    if context is not None:
        wanted = replace(wanted, context=context)
    if line.has("--multi-latent-attention") and wanted.tensor > 1:
        # docs/bad-input.md: these layers lose part of a gradient.
        wanted = replace(wanted, tensor=1)
        line.changes.append(
            f"{_TENSOR} 1: Megatron-Core's local layers of latent attention take one tensor-parallel rank"
        )
    found = fit(wanted, most, is_pipeline_inside=line.has("--use-tp-pp-dp-mapping"))
    if context is not None and found.context < min(context, most):
        raise ValueError(f"--context-parallel-size {context} does not fit on {most} ranks")
    for flag, size in (
        (_TENSOR, found.tensor),
        (_PIPELINE, found.pipeline),
        (_CONTEXT, found.context),
        (_EXPERT, found.expert),
        (_EXPERT_TENSOR, found.expert_tensor),
    ):
        is_default = size == (found.tensor if flag == _EXPERT_TENSOR else 1)
        if line.has(flag) or not is_default:
            line.set(flag, size, why=f"{most} ranks")
    dispatcher = "--moe-token-dispatcher-type"
    if found.expert_tensor > 1 and line.text(dispatcher) == "alltoall":
        line.set(dispatcher, "allgather", why="gloo cannot gather parts of different sizes")
    if found.tensor == 1:
        line.drop(("--sequence-parallel",), "there is one tensor-parallel rank")
    replicas = found.data * found.context
    if line.has(_INSTANCES) and replicas % line.number(_INSTANCES, 1):
        line.drop((_INSTANCES,), f"there are {replicas} replicas")
    return found


def cut_stages(line: CommandLine, pipeline: int, least: int) -> int:
    """Cuts the pipeline's stages to as few layers as show its shape; returns the number of layers.

    Args:
        line: the recipe, whose parallel sizes are cut.
        pipeline: stages that ranks hold.
        least: layers that the model needs at least.
    """
    if pipeline == 1:
        given = (_WRITTEN_OUT, _PER_STAGE, _STAGES, _GROUP, _FIRST, _LAST, *_COUNTED)
        line.drop(given, "there is one pipeline stage")
        return least
    if line.has(_WRITTEN_OUT):
        return _cut_written_out(line, pipeline, least)
    virtual = 2 if line.has(_PER_STAGE, _STAGES) else 1
    if line.has(_PER_STAGE):
        line.set(_PER_STAGE, 1)
    line.lower(_STAGES, 2)
    line.lower(_GROUP, pipeline)
    ends = [flag for flag in (_FIRST, _LAST) if line.has(flag)]
    if ends:
        return _cut_uneven(line, pipeline, virtual, ends)
    counted = sum(line.has(flag) for flag in _COUNTED)
    layers = pipeline * virtual * (2 if counted else 1)
    while layers < least:
        layers += pipeline * virtual
        if line.has(_PER_STAGE):
            line.set(_PER_STAGE, layers // (pipeline * virtual))
    return layers - counted


def _cut_uneven(line: CommandLine, pipeline: int, virtual: int, ends: list[str]) -> int:
    """Keeps the first and last stage of another length than those between them."""
    lengths = {flag: virtual * (1 + place) for place, flag in enumerate(ends)}
    for flag, layers in lengths.items():
        line.set(flag, layers, why="few layers")
    return sum(lengths.values()) + 2 * virtual * (pipeline - len(ends))


def _cut_written_out(line: CommandLine, pipeline: int, least: int) -> int:
    """Writes a shorter layout whose first and last stage hold what the recipe's hold."""
    stages = stages_of(line.text(_WRITTEN_OUT))
    before = line.number(_PIPELINE, 1) if line.has(_PIPELINE) else 1
    virtual = 1 if len(stages) <= max(before, pipeline) else 2
    predicted = min(line.number("--mtp-num-layers", 0), 1)
    middle = "t" * max(1, -(-least // (pipeline * virtual)))
    usual = max(stage.count("t") for stage in stages[1:-1] or stages[1:])
    first = stages[0].count("t")
    cut = [middle] * (pipeline * virtual)
    cut[0] = "E" + ("" if not first else middle + "t" * (first > usual))
    cut[-1] = (middle if "t" in stages[-1] else "") + "m" * predicted + "L"
    layers = "".join(cut).count("t")
    if layers < least:
        cut[1] = cut[1].replace("t", "t" * (1 + least - layers), 1)
    line.set(_WRITTEN_OUT, "|".join(cut), why="few layers")
    return "".join(cut).count("t")
