"""compute-sanitizer on tiny cases, after everything else: memcheck decides, racecheck and synccheck are heard.

The kernels wait on barriers and fences that are written as PTX. racecheck and synccheck know those of the compiler's
own making better, so a report of theirs is printed and kept as a note to be read, and proves nothing by itself. What
memcheck reports is an access outside an allocation: that is wrong.
"""

import os
import subprocess
from pathlib import Path

from tools.gpu import values

TOOLS = ("memcheck", "racecheck", "synccheck")
DECIDING = ("memcheck",)
ERROR_EXIT = 9  # of compute-sanitizer, when it has something to report
KEPT_LINES = 12
STAGES_STEP = 9  # of so many variants one is run as stages call it: minutes under memcheck


def run_tiny(share: values.Share) -> None:
    """Runs a handful of tiny cases; for compute-sanitizer."""
    for index, small in enumerate(values.small_checks(quick=True, share=share)):
        if index % 5 == 0 and small.mask.num_queries <= 400:
            values.check_small(small)
            if values.has_gradients(small.variant):
                values.check_gradients(small)
    for variant in values.forward_variants(share)[::STAGES_STEP]:
        values.check_stages(variant)


def run(tool: str, program: list[str], seconds: float, folder: Path) -> tuple[str, str]:
    """Returns (verdict, words) of a program under one of the tools: ok, FAILED, reported or "not run"."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(ERROR_EXIT), *program]
    verdict, words = run_command(command, seconds, folder)
    return ("reported" if verdict == "FAILED" and tool not in DECIDING else verdict), words


def run_command(command: list[str], seconds: float, folder: Path) -> tuple[str, str]:
    """Returns (ok, FAILED or "not run", why)."""
    try:
        # Without PyTorch's pool every tensor has an allocation of its own, and an access beside it is seen.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, cwd=folder, env=environment
        )
    except FileNotFoundError:
        return "not run", "compute-sanitizer is not on PATH"
    except subprocess.TimeoutExpired:
        return "not run", f"not done after {seconds:.0f} s"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if any("not supported" in line.lower() for line in lines):
        return "not run", next(line for line in lines if "not supported" in line.lower())
    if done.returncode:
        reported = [line for line in lines if line.startswith("=========")] or lines
        return "FAILED", " / ".join(reported[:KEPT_LINES])
    return "ok", lines[-1] if lines else ""
