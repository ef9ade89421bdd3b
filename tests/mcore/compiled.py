"""Programs that torch compiles for the CPU: the suite itself runs uncompiled."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

needs_headers = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists() or " " in torch.__file__,
    reason="torch compiles for the CPU with Python's headers, and with its own in a folder without a blank",
)


def run_compiled(program: str) -> str:
    """Returns what a program prints whose `torch.compile` compiles.

    Graphs and kernels are made anew each time; what g++ made of a kernel stays in the session's folder.
    """
    ours = {
        "TORCH_COMPILE_DISABLE": "0",
        # Scalar code: torch would first compile programs that find out what the CPU's vectors are.
        "TORCHINDUCTOR_CPP_SIMDLEN": "0",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        # In this process: a pool of others costs an import of torch in each, for two kernels.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **ours}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
