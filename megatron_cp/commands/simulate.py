"""`simulate`: every planner on 8 to 4096 ranks, or a step of several replicas, on paper."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.command_line import Progress, add_json, prepare_outputs, say_written, show
from megatron_cp.commands.arguments import (
    add_documents,
    add_heads,
    add_planning,
    assumed,
    assumed_line,
    config_of,
    count,
    pack_tokens,
    planners_of,
    rank_count,
    ranks,
    refuse_unused,
    source_of,
)
from megatron_cp.config import MAX_RANKS
from megatron_cp.plan.hardware.speeds import known_speeds
from megatron_cp.report.figures.view import MAX_RANKS_PICTURED
from megatron_cp.report.simulation.replicas import (
    replicas_text,
    replicas_values,
    study_replicas,
)
from megatron_cp.report.simulation.study import (
    Study,
    run_study,
    study_text,
    study_values,
)
from megatron_cp.report.sources import MaskChoice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_documents(parser)
    parser.add_argument(
        "--context-parallel-size", type=ranks, metavar="N[,N...]",
        help="ranks; default: 8,64,512, or 8 with --data-parallel-size",
    )  # fmt: skip
    parser.add_argument(
        "--data-parallel-size", type=rank_count, metavar="N",
        help="replicas: a step of them, with and without --hybrid-context-parallel, by the first planner",
    )  # fmt: skip
    parser.add_argument(
        "--global-batch-size", type=count, metavar="N",
        help="packs of a step of --data-parallel-size replicas; default: one for each",
    )  # fmt: skip
    add_heads(parser)
    add_planning(parser)
    add_json(parser)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the pictures, plans of the first size"
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="write the timeline of the first size"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write that timeline as a Chrome trace"
    )


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Prints the tables and writes what was asked for."""
    has_replicas = args.data_parallel_size is not None
    args.context_parallel_size = args.context_parallel_size or (
        [8] if has_replicas else [8, 64, 512]
    )
    if has_replicas:
        return _run_replicas(args, words)
    refuse_unused(args, "global_batch_size", source="--data-parallel-size")
    cp_sizes = args.context_parallel_size
    sizes = [(n, pack_tokens(args, n)) for n in cp_sizes]
    config, planners = config_of(args), planners_of(args)
    if args.svg is not None and min(cp_sizes) > MAX_RANKS_PICTURED:
        raise ValueError(
            f"--svg {args.svg}: there is no plan at {min(cp_sizes)} ranks to draw; ask for at most "
            f"{MAX_RANKS_PICTURED} ranks"
        )
    choice, source = MaskChoice(args.mask, args.window_size), source_of(args)
    prepare_outputs(args.json, args.html, args.svg, args.trace)
    progress = Progress("simulate")
    study = run_study(source, choice, sizes, config, planners, seed=args.seed, tell=progress)
    progress.clear()
    _show(study_text(study), study_values(study), assumed(args, words), args.json)
    _write_pictures(study, args, shlex.join(["megatron-cp", *words]))
    return 0


def _show(
    text: str, values: dict[str, object], found: dict[str, int | str], json_path: Path | None
) -> None:
    """Prints the figures and what was assumed for them."""
    show(f"{text}\n\n{assumed_line(found)}", {**values, "assumed": found}, json_path)


def _run_replicas(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Prints a step of replicas in every layout."""
    for name in ("html", "svg", "trace"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name} {getattr(args, name)} draws the plans of one pack; leave out --data-parallel-size"
            )
    dp_size = args.data_parallel_size
    for cp_size in args.context_parallel_size:
        if dp_size * cp_size > MAX_RANKS:
            raise ValueError(
                f"--data-parallel-size {dp_size} times --context-parallel-size {cp_size} must be at most {MAX_RANKS} "
                "ranks, over which --hybrid-context-parallel makes one plan; give less of either"
            )
    num_packs = args.global_batch_size or dp_size
    if num_packs % dp_size:
        raise ValueError(
            f"--global-batch-size {num_packs} must be a multiple of --data-parallel-size {dp_size}; give "
            f"{-(-num_packs // dp_size) * dp_size}"
        )
    progress, config, source = Progress("simulate"), config_of(args), source_of(args)
    if dp_size > 1 and known_speeds(config) is not None:
        raise ValueError(
            "--data-parallel-size with --cp-rank-speeds, or a --cp-topology profile with rank_speeds, is not served: "
            "they name the ranks of one replica, and a plan spans all; drop one of the two"
        )
    prepare_outputs(args.json)
    choice = MaskChoice(args.mask, args.window_size)
    studies = [
        study_replicas(
            source,
            choice,
            (n, dp_size, pack_tokens(args, n), num_packs),
            config,
            seed=args.seed,
            tell=progress,
        )
        for n in args.context_parallel_size
    ]
    progress.clear()
    _show(replicas_text(studies), replicas_values(studies), assumed(args, words), args.json)
    return 0


def _write_pictures(study: Study, args: argparse.Namespace, command: str) -> None:
    if args.trace is args.svg is args.html is None:
        return
    from megatron_cp.report.simulation.page import simulation_page, timeline_file, trace_of

    if args.trace is not None:
        _write(args.trace, json.dumps(trace_of(study), indent=1) + "\n")
        say_written(args.trace, "; open it in ui.perfetto.dev or chrome://tracing")
    if args.svg is not None:
        _write(args.svg, timeline_file(study))
        say_written(args.svg)
    if args.html is not None:
        from megatron_cp.report.draw.html import write_page

        write_page(args.html, simulation_page(study, command))
        say_written(args.html)


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")
