"""The words of `python -m megatron_cp simulate`, and what it does with them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_cp.config import CPConfig
from megatron_cp.plan import PLANNERS
from megatron_cp.plan.topology import TOPOLOGIES, read_topology
from megatron_cp.plan.workloads import MASKS, MAX_TOKENS, WORKLOADS
from megatron_cp.report.arguments import SPLIT, count, ranks, refuse_unused, tokens
from megatron_cp.report.simulation import study as simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data-path", metavar="PREFIX", help="PREFIX.bin and PREFIX.idx")
    source.add_argument(
        "--lengths-path",
        type=Path,
        metavar="PATH",
        help="document lengths: JSON list, a number per line, .npy, or a folder of texts",
    )
    source.add_argument("--workload", metavar="NAME", help=f"default W1; {', '.join(WORKLOADS)}")
    parser.add_argument("--mask", default="causal_document", metavar="NAME", help=", ".join(MASKS))
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seq-length", type=tokens, help="tokens of a pack, as 131072, 128K or 1M")
    length.add_argument(
        "--tokens-per-rank", type=tokens, help="the pack grows with the ranks; default 8K"
    )
    parser.add_argument(
        "--context-parallel-size", type=ranks, default=[8, 64, 512], metavar="N[,N...]",
        help="default: 8,64,512",
    )  # fmt: skip
    parser.add_argument("--num-attention-heads", type=count, default=64)
    parser.add_argument("--num-query-groups", type=count, help="default: an eighth of the heads")
    parser.add_argument("--kv-channels", type=count, default=128, help="size of a head")
    parser.add_argument("--cp-planners", type=_words, help="default: all; as auto,zigzag,usp")
    parser.add_argument("--cp-chunk-size", type=count, help="tokens per unit of dispatch")
    parser.add_argument(
        "--cp-topology", default="h100", metavar="NAME",
        help=f"{', '.join(TOPOLOGIES)}, or a measured profile (FILE.json)",
    )  # fmt: skip
    parser.add_argument("--split", help=f"of --data-path, first part used; default {SPLIT}")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn, or of the order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write pictures of the first size"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write its timeline alone")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace of it")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def study_of(args: argparse.Namespace) -> simulation.Study:
    """Returns the study that the arguments ask for; ValueError or OSError for what cannot be."""
    if args.data_path is None:
        refuse_unused(args, "split")
    if args.data_path is not None:
        split = SPLIT if args.split is None else args.split
        source = simulation.source_of_corpus(args.data_path, split, args.seed)
    elif args.lengths_path is not None:
        source = simulation.source_of_path(args.lengths_path)
    else:
        source = simulation.source_of_workload(args.workload or "W1")
    per_rank = args.tokens_per_rank or (8 << 10)
    sizes = [(n, args.seq_length or n * per_rank) for n in args.context_parallel_size]
    for cp_size, num_tokens in sizes:
        if num_tokens > MAX_TOKENS:
            raise ValueError(
                f"--tokens-per-rank {per_rank} on {cp_size} ranks is a pack of {num_tokens} tokens; it must "
                f"be at most {MAX_TOKENS}: give at most {MAX_TOKENS // cp_size}"
            )
    heads = args.num_attention_heads
    config = CPConfig(
        chunk_size=args.cp_chunk_size,
        num_heads=heads,
        num_kv_heads=args.num_query_groups or max(1, heads // 8),
        head_dim=args.kv_channels,
        topology=read_topology(args.cp_topology),
    )
    planners = args.cp_planners or sorted(PLANNERS, key=lambda name: (name != "auto", name))
    return simulation.run_study(source, args.mask, sizes, config, planners, args.seed)


def run(args: argparse.Namespace, command: str) -> list[str]:
    """Does what the arguments say; returns the lines to print."""
    study = study_of(args)
    printed = [simulation.study_text(study)]
    if args.json is not None:
        _write(args.json, simulation.study_values(study))
        printed.append(f"wrote {args.json}")
    if args.trace is not None:
        from megatron_cp.report.simulation.page import trace_of

        _write(args.trace, trace_of(study))
        printed.append(f"wrote {args.trace}; open it in ui.perfetto.dev or chrome://tracing")
    if args.svg is not None:
        from megatron_cp.report.simulation.page import timeline_file

        args.svg.parent.mkdir(parents=True, exist_ok=True)
        args.svg.write_text(timeline_file(study))
        printed.append(f"wrote {args.svg}")
    if args.html is not None:
        from megatron_cp.report.draw.html import write_page
        from megatron_cp.report.simulation.page import simulation_page

        write_page(args.html, simulation_page(study, command))
        printed.append(f"wrote {args.html}")
    return printed


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
