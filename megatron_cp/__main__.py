"""`python -m megatron_cp doctor | plan | simulate | emulate | report`: what there is, on paper, emulated, in pictures.

Bad input is one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_cp import emulate_command
from megatron_cp.command_line import OneLineParser, refuse
from megatron_cp.config import CPConfig
from megatron_cp.data.packing import PACKING_POLICIES, PackingConfig
from megatron_cp.plan import PLANNERS
from megatron_cp.plan.topology import TOPOLOGIES, read_topology
from megatron_cp.report.arguments import (
    SPLIT,
    count,
    lengths,
    rank_count,
    refuse_unused,
    tokens,
    window,
)
from megatron_cp.report.dry_run import study as dry_run
from megatron_cp.report.simulation import command as simulate_command

PACKS = 2  # that `plan` plans


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    try:
        return int(args.run(args, words))
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, NotImplementedError, OSError) as problem:
        refuse(f"python -m megatron_cp {args.command}", [str(problem)])
    except MemoryError as problem:
        refuse(
            f"python -m megatron_cp {args.command}",
            [f"out of memory ({problem}); plan fewer tokens, documents or ranks"],
        )


def build_parser() -> OneLineParser:
    """Returns the parser of all commands."""
    parser = OneLineParser(prog="python -m megatron_cp", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="what is installed, what works, can training run", allow_abbrev=False
    )
    doctor.add_argument(
        "--megatron",
        type=Path,
        metavar="CHECKOUT",
        help="look at this Megatron-LM checkout instead: do our hooks fit it? nothing of it is run",
    )
    doctor.set_defaults(run=_doctor)
    _add_plan(
        commands.add_parser(
            "plan", help="a dry run on your data, without a GPU", allow_abbrev=False
        )
    )
    simulate = commands.add_parser(
        "simulate", help="every planner on 8 to 4096 ranks, on paper", allow_abbrev=False
    )
    simulate_command.add_arguments(simulate)
    simulate.set_defaults(run=_simulate)
    emulate = commands.add_parser(
        "emulate", help="one case of the Hopper kernels on this CPU", allow_abbrev=False
    )
    emulate_command.add_arguments(emulate)
    emulate.set_defaults(run=_emulate)
    report = commands.add_parser(
        "report", help="one offline HTML file of a training run", allow_abbrev=False
    )
    report.add_argument("run_dir", type=Path, help="what --run-dir named when training")
    report.add_argument("--output", type=Path, help="default: report.html in the run's folder")
    report.add_argument(
        "--compare", type=Path, metavar="RUN_DIR", help="overlay another run's loss"
    )
    report.set_defaults(run=_report)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data-path", metavar="PREFIX", help="PREFIX.bin and PREFIX.idx")
    source.add_argument("--lengths", type=lengths, help="document lengths: 137,2041,89")
    parser.add_argument("--mask", choices=dry_run.MASKS, help="default: documents")
    parser.add_argument("--window-size", type=window, help="sliding window, keys before,after")
    parser.add_argument("--seq-length", type=tokens, help="tokens of a pack, as 131072 or 128K")
    parser.add_argument("--split", help=f"of --data-path, first part used; default {SPLIT}")
    parser.add_argument(
        "--packing", choices=PACKING_POLICIES, help="of --data-path; default: split"
    )
    parser.add_argument("--seed", type=int, help="order of --data-path's documents; default 1234")
    parser.add_argument("--packs", type=count, help=f"packs to plan; default {PACKS}")
    parser.add_argument("--context-parallel-size", type=rank_count, default=8)
    parser.add_argument("--tensor-model-parallel-size", type=count, default=1)
    parser.add_argument("--num-attention-heads", type=count, default=32)
    parser.add_argument("--num-query-groups", type=count, help="default: as many as heads")
    parser.add_argument("--kv-channels", type=count, default=128, help="size of a head")
    parser.add_argument("--cp-planner", default="auto", choices=sorted(PLANNERS))
    parser.add_argument("--cp-chunk-size", type=count, help="tokens per unit of dispatch")
    parser.add_argument(
        "--cp-topology", default="h100", metavar="NAME",
        help=f"{', '.join(TOPOLOGIES)}, or a measured profile (.json)",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the pictures here")
    parser.set_defaults(run=_plan)


def _doctor(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_cp import checkout, doctor

    if args.megatron is not None:
        findings = checkout.examine_checkout(args.megatron)
        fits = doctor.can_train(findings)
        verdict = "our hooks fit this checkout" if fits else "our hooks do not fit this checkout"
        print(doctor.findings_text(findings), verdict, sep="\n")
        return 0 if fits else 1
    findings = doctor.examine()
    print(doctor.doctor_text(findings))
    return 0 if doctor.can_train(findings) else 1


def _plan(args: argparse.Namespace, words: Sequence[str]) -> int:
    corpus = _corpus(args)
    if args.window_size is not None:
        corpus = dry_run.with_window(corpus, args.window_size)
    run = dry_run.plan_corpus(corpus, args.context_parallel_size, _config(args))
    print(dry_run.dry_run_text(run))
    if args.html is not None:
        command = shlex.join(["python", "-m", "megatron_cp", *words])
        print(f"wrote {dry_run.write_dry_run_report(run, args.html, command)}")
    return 0


def _simulate(args: argparse.Namespace, words: Sequence[str]) -> int:
    command = shlex.join(["python", "-m", "megatron_cp", *words])
    print(*simulate_command.run(args, command), sep="\n")
    return 0


def _emulate(args: argparse.Namespace, words: Sequence[str]) -> int:
    lines, status = emulate_command.run(args)
    print(*lines, sep="\n", file=sys.stderr if status else sys.stdout)
    return status


def _corpus(args: argparse.Namespace) -> dry_run.Corpus:
    if args.data_path is not None:
        if args.seq_length is None:
            raise ValueError("--data-path needs --seq-length, the tokens of a pack")
        packing = PackingConfig(
            seq_length=args.seq_length,
            policy=args.packing or "split",
            seed=1234 if args.seed is None else args.seed,
        )
        return dry_run.corpus_of_files(
            args.data_path,
            split=SPLIT if args.split is None else args.split,
            config=packing,
            mask=args.mask or "documents",
            num_packs=args.packs or PACKS,
        )
    refuse_unused(args, "split", "packing", "seed")
    if args.lengths is not None:
        return dry_run.corpus_of_lengths(
            args.lengths,
            seq_length=args.seq_length,
            mask=args.mask or "documents",
            num_packs=args.packs or PACKS,
        )
    if args.mask not in dry_run.WHOLE_MASKS or args.seq_length is None:
        raise ValueError(
            "nothing to plan; give --data-path PREFIX --seq-length N, or --lengths 137,2041,89, or "
            "--mask causal --seq-length N"
        )
    refuse_unused(args, "packs", source="--data-path or --lengths")
    return dry_run.corpus_of_mask(args.mask, args.seq_length)


def _config(args: argparse.Namespace) -> CPConfig:
    heads, tp = args.num_attention_heads, args.tensor_model_parallel_size
    if heads % tp:
        raise ValueError(
            f"--num-attention-heads {heads} must be a multiple of --tensor-model-parallel-size {tp}"
        )
    return CPConfig(
        planner=args.cp_planner,
        chunk_size=args.cp_chunk_size,
        num_heads=heads // tp,
        num_kv_heads=max(1, (args.num_query_groups or heads) // tp),
        head_dim=args.kv_channels,
        topology=read_topology(args.cp_topology),
    )


def _report(args: argparse.Namespace, words: Sequence[str]) -> int:
    from megatron_cp.report.run.page import write_run_report

    written = write_run_report(args.run_dir, args.output, args.compare)
    print(f"wrote {written} ({written.stat().st_size / 1e3:,.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
