#!/usr/bin/env python
r"""Hugging Face checkpoints to Megatron's, and back.

    python tools/convert_checkpoint.py --from hf --to megatron --load Llama-3.1-8B --save llama
    python tools/convert_checkpoint.py --from megatron --to hf --load runs/llama --save llama-hf \
        --hf-folder Llama-3.1-8B

Families, limits and memory: docs/convert.md. One process, no GPU.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_cp import command_line

PROGRAM = "convert_checkpoint.py"
MAX_LINES = 50


def refuse(reasons: Sequence[str]) -> NoReturn:
    """Prints one line per reason, as far as they can be read at once, and leaves with code 2."""
    more = len(reasons) - MAX_LINES
    rest = [f"and {more} more like these"] if more > 0 else []
    command_line.refuse(PROGRAM, [*reasons[:MAX_LINES], *rest])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be by itself."""
    formats = ("hf", "megatron")
    summary = (__doc__ or "").split("\n")[0]
    parser = command_line.ToolParser(prog=PROGRAM, description=summary, allow_abbrev=False)
    add = parser.add_argument
    add("--from", dest="source", choices=formats, required=True)
    add("--to", dest="target", choices=formats, required=True)
    add("--load", type=Path, required=True, help="folder to read")
    add("--save", type=Path, required=True, help="folder to write; must not exist")
    add("--leave-out", nargs="+", default=[], metavar="PATTERN", help="tensors without a place")
    add("--ignore-config-keys", nargs="+", default=[], metavar="KEY", help="they change nothing")
    add("--max-file-gb", type=float, default=5.0, help="size of one file of weights")
    group = parser.add_argument_group("to megatron")
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128, metavar="N")
    group.add_argument(
        "--transformer-impl", choices=("local", "transformer_engine"), default="local"
    )
    group = parser.add_argument_group("to hf")
    group.add_argument("--hf-folder", type=Path, help="where config.json and tokenizer come from")
    group.add_argument("--family", help="recompute config.json for this model_type")
    group.add_argument("--ckpt-step", type=int, metavar="N", help="default: the newest")
    arguments = parser.parse_args(argv)
    if arguments.source == arguments.target:
        parser.error(f"--from {arguments.source} --to {arguments.target} must differ")
    if not 0 < arguments.max_file_gb < math.inf:
        parser.error(f"--max-file-gb {arguments.max_file_gb} must be positive and finite")
    if arguments.make_vocab_size_divisible_by <= 0:
        parser.error(
            f"--make-vocab-size-divisible-by {arguments.make_vocab_size_divisible_by} must be "
            "positive"
        )
    return arguments


@command_line.answering(PROGRAM)
def main(argv: Sequence[str] | None = None) -> int:
    """Converts; returns the exit status."""
    arguments = parse_arguments(argv)

    from megatron_cp.mcore import cpu
    from megatron_cp.mcore.versions import compat

    compat.silence_known_warnings()
    cpu.install()
    try:
        from megatron_cp.models.hugging_face import convert
        from megatron_cp.models.hugging_face.families import FAMILIES
        from megatron_cp.models.hugging_face.refusal import ConversionError
    except ImportError as problem:
        refuse([str(problem)])
    if arguments.family is not None and arguments.family not in FAMILIES:
        refuse([f"--family {arguments.family} is not served; one of {', '.join(FAMILIES)}"])
    request = convert.Request(
        load=arguments.load,
        save=arguments.save,
        make_vocab_size_divisible_by=arguments.make_vocab_size_divisible_by,
        transformer_engine=arguments.transformer_impl == "transformer_engine",
        leave_out=tuple(arguments.leave_out),
        ignored_keys=tuple(arguments.ignore_config_keys),
        max_file_bytes=int(arguments.max_file_gb * 1e9),
        iteration=arguments.ckpt_step,
        hf_folder=arguments.hf_folder,
        family=arguments.family,
    )
    try:
        to_megatron = arguments.target == "megatron"
        report = convert.to_megatron(request) if to_megatron else convert.to_hugging_face(request)
    except ConversionError as problem:
        refuse(problem.reasons)
    except OSError as problem:
        name = problem.filename or arguments.save
        refuse(
            [f"{name}: {problem.strerror}; reading and writing must be allowed; free or change it"]
        )
    show(arguments.save, report)
    flags = training_flags(report.arguments) if to_megatron else []
    if flags:
        print(f"flags of pretrain_gpt.py: --finetune --load {arguments.save} {shlex.join(flags)}")
    return 0


def show(save: Path, report: Any) -> None:
    """Prints what was converted, carried along, not compared and left behind."""
    print(f"{save}: {report.num_tensors} tensors, {report.num_bytes / 1e9:.3f} GB")
    print(f"carried along: {', '.join(report.carried) or 'nothing'}")
    if not report.is_compared:
        print(
            "note: the checkpoint holds no arguments of its run: config.json was compared with shapes alone, and may "
            "be that of another model"
        )
    for name in (*report.left, *report.left_files):
        print(f"left behind: {name}")


def training_flags(arguments: dict[str, Any]) -> list[str]:
    """Returns the model's flags for pretrain_gpt.py. Raises ValueError for what it has no flag for."""
    from megatron_cp.training.arguments import flags_of

    if not isinstance(arguments.get("rotary_base", 0), int):
        raise ValueError(
            f"the checkpoint is written, but pretrain_gpt.py cannot train it: --rotary-base takes whole numbers, and "
            f"the model has {arguments['rotary_base']}; set it in code (rotary_base of GPTModel)"
        )
    model = {name: value for name, value in arguments.items() if name != "padded_vocab_size"}
    return flags_of({**model, "attention_dropout": 0.0, "hidden_dropout": 0.0})


if __name__ == "__main__":
    sys.exit(main())
