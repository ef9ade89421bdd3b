"""Completes and checks which layers lie on which pipeline stage.

Three ways to say it: evenly, with another number on the first and last stage, or written out:

    Et*3|(tt|)*2mL      E embedding, t decoder layer, m multi-token prediction, L loss, | next stage

Each check yields its faults as `faults.py` describes.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Generator, Iterator
from typing import TypeVar

from megatron_cp.mcore.settings.sparse_settings import is_sparse, layers_that_pick
from megatron_cp.training.arguments.faults import discard

T = TypeVar("T")
_EVEN_FLAGS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)
_EVEN_SWITCHES = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def complete_stages(args: Namespace) -> Iterator[str]:
    """Completes the number of virtual stages per rank."""
    args.virtual_pipeline_model_parallel_size = None
    num_chunks: int | None
    if args.pipeline_model_parallel_layout is not None:
        num_chunks = yield from _written_out(args)
    else:
        num_chunks = yield from _counted(args)
    if num_chunks is not None and num_chunks > 1:
        args.virtual_pipeline_model_parallel_size = num_chunks


def stages_of(layout: str) -> list[str]:
    """Returns the letters of each stage of a layout, e.g. `["Ett", "tt", "tL"]`.

    `(..)*n` and `x*n` repeat, commas are for the eye. Raises ValueError for any other character.
    Source: the layout strings of Megatron-Core's `PipelineParallelLayerLayout`.
    """
    text = layout.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"([EtmL|])\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    stray = sorted(set(text) - set("EtmL|"))
    if stray:
        raise ValueError(f"{''.join(stray)!r} is none of E, t, m, L, |, (..)*n and x*n")
    return text.split("|")


def check_shared_picks(args: Namespace) -> Iterator[str]:
    """Yields a line if a stage would begin with a layer that takes the keys that one on another stage has picked."""
    if not is_sparse(args):
        return
    picks, counts = layers_that_pick(args), layers_of_stages(args)
    firsts = [sum(counts[:stage]) for stage, count in enumerate(counts) if count > 0]
    stranded = [first for first in firsts if not picks[first]]
    if stranded:
        yield (
            f"--dsa-indexer-topk-freq {args.dsa_indexer_topk_freq} --dsa-indexer-skip-topk-offset "
            f"{args.dsa_indexer_skip_topk_offset}: a pipeline stage begins with layer {stranded[0] + 1}, which takes "
            "what a layer before it has picked; let every stage begin with one that picks: layers "
            f"{', '.join(str(i + 1) for i, picking in enumerate(picks) if picking)}"
        )


def layers_of_stages(args: Namespace) -> list[int]:
    """Returns how many decoder layers each stage has, in their order; nothing where stages are not rightly said."""
    if args.pipeline_model_parallel_layout is not None:
        try:
            counts = [stage.count("t") for stage in stages_of(args.pipeline_model_parallel_layout)]
        except ValueError:
            return []
    else:
        per_rank = _returned(_layers_of_ranks(args))
        if per_rank is None:
            return []
        num_chunks = args.virtual_pipeline_model_parallel_size or 1
        counts = [count // num_chunks for _ in range(num_chunks) for count in per_rank]
        counts[0] -= args.account_for_embedding_in_pipeline_split
        counts[-1] -= args.account_for_loss_in_pipeline_split
    return counts if sum(counts) == args.num_layers else []


def _returned(steps: Generator[str, None, T]) -> T:
    """Returns what a check returns, whose faults were told before."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value


def _written_out(args: Namespace) -> Generator[str, None, int | None]:
    """Checks --pipeline-model-parallel-layout; returns the stages of a rank."""
    flag = f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout}"
    others = [name for name in _EVEN_FLAGS if getattr(args, name) is not None]
    others += [name for name in _EVEN_SWITCHES if getattr(args, name)]
    if others:
        names = ", ".join("--" + name.replace("_", "-") for name in others)
        yield f"{flag} places every layer; leave out {names}"
        return None
    try:
        stages = stages_of(args.pipeline_model_parallel_layout)
    except ValueError as problem:
        yield f"{flag}: {problem}"
        return None
    pp, layers, letters = args.pipeline_model_parallel_size, args.num_layers, "".join(stages)
    predicted = args.mtp_num_layers or 0
    faults = [
        (
            len(stages) % pp or (pp == 1 < len(stages)),
            f"has {len(stages)} stages; --pipeline-model-parallel-size is {pp}",
        ),
        (letters.count("t") != layers, f"has {letters.count('t')} t; --num-layers is {layers}"),
        (
            letters.count("m") != predicted,
            f"has {letters.count('m')} m; --mtp-num-layers is {predicted}",
        ),
        (
            not re.fullmatch(r"Et*m*L", letters),
            "must be one E, then every t, then every m, then one L",
        ),
        (
            predicted and not any(stage.count("m") == predicted for stage in stages),
            "must have every m on one stage",
        ),
        (
            predicted and "m" in "".join(stages[: len(stages) - pp]),
            "must have m on the last virtual stage of a rank",
        ),
        (
            # Its output layer's gradient would be added to the embedding's: 8 % in the norm of all, on two ranks.
            predicted and not stages[-1].endswith("mL"),
            "must have m and L on the last stage; Megatron-Core mixes gradients of embedding and output elsewhere",
        ),
    ]
    found = [text for is_fault, text in faults if is_fault]
    for text in found:
        yield f"{flag} {text}"
    return None if found else len(stages) // pp


def _counted(args: Namespace) -> Generator[str, None, int | None]:
    """Checks layouts that are given by numbers of layers; returns the stages of a rank."""
    pp = args.pipeline_model_parallel_size
    per_virtual = args.num_layers_per_virtual_pipeline_stage
    num_chunks = args.num_virtual_stages_per_pipeline_rank
    if per_virtual is not None and num_chunks is not None:
        yield (
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "say the same; give one"
        )
        return None
    per_rank = yield from _layers_of_ranks(args)
    if per_virtual is None and num_chunks is None:
        return None
    if pp < 2:
        yield "virtual pipeline stages need --pipeline-model-parallel-size of 2 or more"
        return None
    if per_rank is None:
        return None
    if per_virtual is not None:
        if len(set(per_rank)) > 1:
            yield (
                "--num-layers-per-virtual-pipeline-stage with stages of different lengths is not "
                "defined; give --num-virtual-stages-per-pipeline-rank"
            )
            return None
        if per_virtual <= 0 or per_rank[0] % per_virtual:
            yield (
                f"--num-layers-per-virtual-pipeline-stage {per_virtual} must divide "
                f"{per_rank[0]} layers a rank"
            )
            return None
        return per_rank[0] // per_virtual
    if num_chunks <= 0 or any(count % num_chunks for count in per_rank):
        counts = " and ".join(map(str, sorted(set(per_rank))))
        yield (
            f"--num-virtual-stages-per-pipeline-rank {num_chunks} must divide {counts} layers a "
            "rank"
        )
        return None
    return num_chunks


def _layers_of_ranks(args: Namespace) -> Generator[str, None, list[int] | None]:
    """Returns the layers of each stage; embedding and loss count where they are to."""
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    ends = {"first": args.decoder_first_pipeline_num_layers}
    ends["last"] = args.decoder_last_pipeline_num_layers
    given = {place: count for place, count in ends.items() if count is not None}
    counted = [name for name in _EVEN_SWITCHES if getattr(args, name)]
    flags = " and ".join(f"--decoder-{place}-pipeline-num-layers" for place in given)
    if given and counted:
        names = " and ".join("--" + name.replace("_", "-") for name in counted)
        yield f"{flags} and {names} exclude each other; give one kind"
        return None
    if not given:
        total = layers + len(counted)
        if total % pp:
            also = " (with embedding and loss as they are counted)" if counted else ""
            pattern = getattr(args, "hybrid_layer_pattern", None)
            said, advice = f"--num-layers {layers}", ""
            if pattern is not None:
                said = f"--hybrid-layer-pattern {pattern}, of {layers} layers,"
                advice = "; mark where its stages begin by |"
            yield (
                f"{said}{also} must be a multiple of --pipeline-model-parallel-size {pp}{advice}"
            )
            discard(args, "num_layers")
            return None
        return [total // pp] * pp
    rest, middle = layers - sum(given.values()), pp - len(given)
    if min(given.values()) <= 0 or rest < 0 or (rest > 0) != (middle > 0) or pp < 2:
        yield f"{flags} must leave what {pp} pipeline stages of {layers} layers can hold"
        return None
    if middle and rest % middle:
        yield f"{flags} leave {rest} layers for {middle} stages; they must divide evenly"
        return None
    each = rest // middle if middle else 0
    counts = [each] * pp
    counts[0] = given.get("first", counts[0])
    counts[-1] = given.get("last", counts[-1])
    return counts
