"""Programs that a reader starts by hand, started as a reader would."""

import os
import subprocess
import sys
from pathlib import Path

from tests.processes import HANG_SECONDS


def run_by_hand(
    program: Path, folder: Path, num_ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a folder, under plain torchrun where it has several ranks, which leaves a folder there."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return subprocess.run(
        [sys.executable, *(torchrun if num_ranks > 1 else []), str(program)],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
