"""How busy a kernel's machine code keeps Hopper's tensor cores, in a model. Nothing is measured, no GPU is needed.

    PYTHONPATH=. python -m tools.kernel_model                      our kernels, compiled with nvcc
    PYTHONPATH=. python -m tools.kernel_model --json bwd_128       one of them, all figures
    PYTHONPATH=. python -m tools.kernel_model --peer _C.so         FlashAttention-3's kernels of another library
    PYTHONPATH=. python -m tools.kernel_model --record             ours whose sources changed, into record.json

For the loop over full tiles, and in the backward pass over masked ones: the share of the cycles in which the
products need the tensor cores, under the assumptions `default` / `tight`. Then the cycles that a work item of
four tiles takes beyond four rounds of the loop, by kind of result (`default`). Two kernels of one backward pass make
seven products; `bwd_256 in two` is their share of the five that are needed. `--peer` takes a library (.so; needs
cuobjdump) or a folder of cubins. Compare kernels under one model only.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_cp.kernels import build, compilers
from tools.kernel_model import record
from tools.kernel_model.disassemble import (
    ToolError,
    cubins_of,
    listing_of_function,
    listing_of_variant,
)
from tools.kernel_model.kernels import Figures, Shape, both_figures, ways_through
from tools.kernel_model.listing import read_listing
from tools.kernel_model.peers import PEERS

OURS = ("fwd_64", "fwd_128", "fwd_256", "bwd_64", "bwd_128", "bwd_192", "bwd_256")
KINDS = {"forward": "fwd", "backward": "bwd", "backward_dkdv": "dkdv", "backward_dq": "dq"}


def known_variants() -> dict[str, build.Variant]:
    """Returns the bf16 variant of every kernel with loops of products, by the name that it has here."""
    return {
        f"{KINDS[v.kernel_pass]}_{v.name.partition('_bf16_')[2]}": v
        for v in build.variants().values()
        if v.kernel_pass in KINDS and "_bf16_" in v.name
    }


def item_rows(variant: build.Variant) -> int:
    """Returns the rows that a work item owns: queries, or keys in the kernels that make dk and dv."""
    owns_keys = variant.kernel_pass in ("backward", "backward_dkdv")
    return int(variant.value("MCP_BLOCK_N" if owns_keys else "MCP_BLOCK_M"))


def of_five_products(dkdv: float, dq: float) -> float:
    """Returns the share of two kernels that make four products and three, of which five are useful."""
    return 5 / (4 / dkdv + 3 / dq)


def shape_of(variant: build.Variant) -> Shape:
    """Returns what a step of our variant computes, from its definitions."""
    block_m, block_n, head_dim = (
        int(variant.value(f"MCP_{key}")) for key in ("BLOCK_M", "BLOCK_N", "HEAD_DIM")
    )
    sizes, value_dim = (block_m, block_n, head_dim), int(variant.value("MCP_VALUE_DIM"))
    apart = Path(variant.source).stem in ("bwd_wide", "bwd_64", "bwd_192")  # code by consumer
    consumers = int(variant.value("MCP_THREADS")) // 128 - 1
    if variant.kernel_pass == "backward":
        return Shape(True, *sizes, consumers, separate_code=apart, value_dim=value_dim)
    if variant.kernel_pass == "backward_dkdv":
        return Shape(True, *sizes, separate_code=apart, products=4, value_dim=value_dim)
    if variant.kernel_pass == "backward_dq":
        return Shape(True, *sizes, products=3, steps_through_keys=True, value_dim=value_dim)
    return Shape(False, *sizes, consumers, turns=True, value_dim=value_dim)


def listings(
    names: Sequence[str], peer: Path | None, folder: Path
) -> Iterator[tuple[str, str, Shape]]:
    """Yields (name, machine code, shape) of our kernels, or of the peer's.

    Raises: ToolError, NoCompilerError, CompileError.
    """
    if peer is None:
        for name in names:
            variant = known_variants()[name]
            yield name, listing_of_variant(variant.name, folder), shape_of(variant)
        return
    cubins = cubins_of(peer, folder)
    for known in PEERS:
        text = listing_of_function(cubins, known.fragment)
        if text is not None:
            yield known.name, text, known.shape


def as_json(both: dict[str, Figures]) -> dict[str, Any]:
    """Returns the figures of one kernel as they are written to JSON."""
    default = both["default"]
    return {
        **{name: round(f.utilisation, 3) for name, f in both.items()},
        "masked": {
            name: round(f.masked_utilisation, 3) for name, f in both.items() if f.masked_utilisation
        },
        "fixed_cycles": {kind: round(cycles) for kind, cycles in default.fixed_cycles.items()},
        "cycles": {name: round(f.cycles) for name, f in both.items()},
        "busy": {kind: round(share, 3) for kind, share in default.steady.busy.items()},
        "waited": {why: round(cycles) for why, cycles in default.steady.waited.items()},
    }


def joint_figures(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the backward passes that are two kernels, as if they were one: `bwd_256` of dkdv_256 and dq_256."""
    joint = {}
    for name, dkdv in found.items():
        dq = found.get(f"dq_{name.removeprefix('dkdv_')}")
        is_even = "_192_128" not in name  # else products differ in width
        if name.startswith("dkdv_") and dq is not None and is_even:
            shares = {at: of_five_products(dkdv[at], dq[at]) for at in ("default", "tight")}
            joint[f"bwd_{name.removeprefix('dkdv_')} in two"] = {
                at: round(share, 3) for at, share in shares.items()
            }
    return joint


def line(name: str, both: dict[str, Figures]) -> str:
    """Returns the figures of one kernel as a line for people."""
    default, tight = both["default"], both["tight"]
    text = f"{name:22s} {default.utilisation:.3f} / {tight.utilisation:.3f}"
    if default.masked_utilisation and tight.masked_utilisation:
        text += f"   masked {default.masked_utilisation:.3f} / {tight.masked_utilisation:.3f}"
    if default.fixed_cycles:
        fixed = (f"{kind} {cycles:.0f}" for kind, cycles in default.fixed_cycles.items())
        text += f"   fixed cycles: {', '.join(fixed)}"
    return text


def modelled(
    names: Sequence[str], peer: Path | None = None, *, tells: bool = True
) -> dict[str, dict[str, Any]]:
    """Returns the figures of kernels, printed one by one if wished."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="mcp-model-") as folder:
        for name, text, shape in listings(names, peer, Path(folder)):
            both = both_figures(ways_through(read_listing(text), shape), shape)
            found[name] = as_json(both)
            if tells:
                print(line(name, both), flush=True)
    return found


def bring_up_to_date() -> int:
    """Models the kernels whose record is of other sources, or of another compiler, and keeps their figures."""
    variants, compiler = known_variants(), compilers.find_compiler("nvcc").name
    kept = record.read(compiler)
    stale = sorted(record.stale(kept, variants))
    print(f"{len(variants) - len(stale)} of {len(variants)} kernels are as they were", flush=True)
    for name, figures in modelled(stale).items():
        kept[name] = figures | {"rows": item_rows(variants[name])}
    record.write(kept, variants, compiler)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.kernel_model", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="KERNEL",
        help=f"of {', '.join(known_variants())}; default: {', '.join(OURS)}",
    )
    parser.add_argument("--peer", type=Path, metavar="FILE", help="a library or a folder of cubins")
    parser.add_argument("--json", action="store_true", help="print all figures")
    parser.add_argument(
        "--record", action="store_true", help=f"bring {record.PATH.name} up to date"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in known_variants()]
    if unknown:
        parser.error(f"unknown kernel {unknown[0]!r}; one of {', '.join(known_variants())}")
    try:
        if options.record:
            return bring_up_to_date()
        found = modelled(options.names or OURS, options.peer, tells=not options.json)
    except (ToolError, compilers.NoCompilerError, compilers.CompileError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    joint = joint_figures(found)
    if options.json:
        print(json.dumps({"model, not measured": found | joint}, indent=1))
    else:
        for name, both in joint.items():
            print(f"{name:22s} {both['default']:.3f} / {both['tight']:.3f}   as one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
