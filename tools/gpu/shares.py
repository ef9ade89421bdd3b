"""The value checks in several processes, each with every n-th variant: the reference on the host takes the time."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_END = 15.0  # for a process to write its page after its own time is up


def run_all(
    jobs: int, quick: bool, seconds: float
) -> Iterator[tuple[list[tuple[str, str, str]], str]]:
    """Yields (checks, why it stopped) of each process; one that leaves no page, or takes too long, says so."""
    with tempfile.TemporaryDirectory(prefix="mcp-values-") as room:
        script = str(ROOT / "tools" / "gpu_check.py")
        threads = max(1, (os.cpu_count() or 1) // jobs)
        processes = []
        for index in range(jobs):
            command = [sys.executable, script, "--part", "values", "--share", f"{index}/{jobs}"]
            command += ["--output", f"{room}/{index}", *(["--quick"] if quick else [])]
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            processes.append(
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)
            )
        deadline = time.monotonic() + seconds + SECONDS_TO_END
        for index, process in enumerate(processes):
            yield _result(process, index, Path(room), deadline)


def _result(
    process: "subprocess.Popen[bytes]", index: int, room: Path, deadline: float
) -> tuple[list[tuple[str, str, str]], str]:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    pages = list(room.glob(f"{index}_values_*.json"))
    if not pages:
        return [], f"process {index} of the value checks ended with {process.returncode}, no page"
    found = json.loads(pages[0].read_text())
    checks = [tuple(check) for check in found["checks"] if check[0] != "build"]
    return checks, found["stopped"]
