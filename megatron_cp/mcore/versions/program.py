"""The Megatron-LM program that this process runs, if it runs one: its arguments and its tokenizer.

Nothing is imported: a program that has not loaded `megatron.training` is not Megatron-LM.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from megatron_cp.mcore.versions.hook_points import Version, dotted


def arguments() -> Namespace | None:
    """Returns the parsed arguments of Megatron-LM; None where it does not run, or has not parsed them yet."""
    return _global("_GLOBAL_ARGS")


def tokenizer() -> Any:
    """Returns Megatron-LM's tokenizer; None where there is none."""
    return _global("_GLOBAL_TOKENIZER")


def check_builds_predictions(version: Version) -> None:
    """Returns if the program can build what its arguments ask for; asked when it imports the spec of its command line.

    A program that builds its models itself (slime has Megatron-LM's arguments too) goes on.

    Raises:
        NotImplementedError: for the predictions of a GPT beside a `--spec`, of which Megatron-LM before 0.19 makes an
            `UnboundLocalError` (gpt_builders.py of 0.16.1, 0.17.1 and 0.18.2; run).
    """
    args = arguments()
    of_hybrids = ("hybrid_layer_pattern", "hybrid_override_pattern")  # which another file builds
    if version >= (0, 19) or any(getattr(args, name, None) for name in of_hybrids):
        return
    if "gpt_builders" not in sys.modules:
        return
    if getattr(args, "spec", None) and getattr(args, "mtp_num_layers", None):
        raise NotImplementedError(
            f"--mtp-num-layers beside --spec: Megatron-LM {dotted(version)} cannot build them in pretrain_gpt.py "
            "(it uses a variable, use_te, that --spec leaves unset); leave out --spec, and begin that file with "
            "'from megatron_cp.mcore import use_in_every_gpt' and 'use_in_every_gpt()'"
        )


def _global(name: str) -> Any:
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)
