"""`plan`: a dry run on the user's data, without a GPU."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.command_line import Progress, add_json, prepare_outputs, say_written, show
from megatron_cp.commands.arguments import (
    SPLIT,
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
    refuse_unused,
    source_of,
)
from megatron_cp.data.packing import PACKING_POLICIES, PackingConfig
from megatron_cp.plan.study.workloads import ALIASES
from megatron_cp.report.dry_run import study
from megatron_cp.report.sources import MaskChoice

PACKS = 2  # that are planned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_documents(parser)
    parser.add_argument(
        "--packing",
        choices=PACKING_POLICIES,
        help="how documents of --data-path fill packs; default: split",
    )
    parser.add_argument("--packs", type=count, default=PACKS, metavar="N", help="packs to plan")
    parser.add_argument(
        "--context-parallel-size", type=rank_count, default=8, metavar="N", help="ranks"
    )
    add_heads(parser)
    add_planning(parser)
    add_json(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the pictures here")


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Prints the plans and the planners side by side."""
    config, planners = config_of(args), planners_of(args)
    corpus = _corpus(args)
    prepare_outputs(args.json, args.html)
    progress = Progress("plan")
    dry_run = study.plan_corpus(corpus, args.context_parallel_size, config, planners, progress)
    progress.clear()
    found = assumed(args, words)
    text = f"{study.dry_run_text(dry_run)}\n\n{assumed_line(found)}"
    show(text, {**study.dry_run_values(dry_run), "assumed": found}, args.json)
    if args.html is not None:
        from megatron_cp.report.draw.html import write_page
        from megatron_cp.report.dry_run.page import dry_run_page

        write_page(args.html, dry_run_page(dry_run, shlex.join(["megatron-cp", *words])))
        say_written(args.html)
    return 0


def _corpus(args: argparse.Namespace) -> study.Corpus:
    """Returns the packs; token files are packed by the loader's own rules."""
    seq_length = pack_tokens(args, args.context_parallel_size)
    # Pictures know the kind of documents by the benchmarks' name.
    choice = MaskChoice(ALIASES.get(args.mask, args.mask), args.window_size)
    if args.data_path is None:
        refuse_unused(args, "packing")
        return study.corpus_of_source(
            source_of(args), choice, seq_length=seq_length, num_packs=args.packs, seed=args.seed
        )
    packing = PackingConfig(seq_length=seq_length, policy=args.packing or "split", seed=args.seed)
    return study.corpus_of_files(
        args.data_path,
        split=args.split or SPLIT,
        config=packing,
        choice=choice,
        num_packs=args.packs,
    )
