"""`measure`: the profile of the user's machines, for plans that know them. Started by torchrun."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.command_line import Progress, prepare_outputs, say_written
from megatron_cp.commands.arguments import add_heads, count, key_heads
from megatron_cp.config import Topology
from megatron_cp.plan.hardware.topology import get_topology, load_profile

ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("output", type=Path, metavar="FILE.json", help="where the profile goes")
    parser.add_argument("--name", default="measured", help="name of the profile")
    parser.add_argument(
        "--wider-groups", type=_sizes, default=(), metavar="N,N",
        help="ranks of a rack, of a pod, as 64,512; default: none, nodes alone are told apart",
    )  # fmt: skip
    parser.add_argument(
        "--rounds",
        type=count,
        default=ROUNDS,
        metavar="N",
        help="of each figure, the least time counts",
    )
    add_heads(parser)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Measures on all ranks; the first writes the file."""
    ranks, node = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks < 2:
        raise ValueError(
            "measure needs the ranks that are to be measured, at least two: torchrun --nproc-per-node 8 -m megatron_cp "
            "measure cluster.json"
        )
    if args.output.suffix != ".json":
        raise ValueError(f"{args.output} must end in .json: --cp-topology knows profiles by that")
    kv_heads = key_heads(args)
    if os.environ.get("RANK") == "0":
        prepare_outputs(args.output)

    import torch
    import torch.distributed as dist

    from megatron_cp.measure.profile import Cluster, measure
    from megatron_cp.measure.rates import Heads

    cluster = Cluster(args.name, node, args.wider_groups)
    cluster.check(ranks)
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    dtype = torch.bfloat16 if on_cuda else torch.float32
    heads = Heads(args.num_attention_heads, kv_heads, args.kv_channels, dtype, device)
    if on_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    is_first = dist.get_rank() == 0
    progress = Progress("measure")
    tick = progress if is_first else lambda words: None
    found = measure(cluster, heads, args.rounds, get_topology("h100" if on_cuda else "cpu"), tick)
    if is_first:
        progress.clear()
        args.output.write_text(json.dumps(found.profile, indent=1) + "\n", encoding="utf-8")
        _print_topology(load_profile(args.output), ranks, node)
        for note in found.notes:
            print(f"  note: {note}")
        sys.stdout.flush()
        say_written(args.output, f"; next: --cp-topology {args.output}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _print_topology(topology: Topology, ranks: int, node: int) -> None:
    """Prints what was measured with so many ranks, and so many on a node."""
    print(f"{topology.name}: {ranks} ranks, {node} on each node")
    for key in ("inner_gbytes_per_s", "outer_gbytes_per_s", "latency_us", "contention"):
        print(f"  {key:20s} {getattr(topology, key):10.4g}")
    print(f"  {'nics_per_node':20s} {topology.nics_per_node or node:10d}")
    for level in topology.outer_levels:
        print(f"  groups of {level.size:<10d} {level.gbytes_per_s:10.4g} GB/s")
    print(f"  {'forward_tflops':20s} {topology.forward_tflops:10.4g}  at best")
    print(f"  {'backward_tflops':20s} {topology.backward_tflops:10.4g}  at best")


def _sizes(word: str) -> tuple[int, ...]:
    return tuple(map(count, word.split(",")))
