"""A long run on two CPU ranks: does any process grow, does any descriptor stay open?

python benchmarks/soak.py --steps 2000 --output benchmarks/results/soak_<hardware>_<date>

The real program under torchrun, context parallel 2, with an evaluation every 50 steps, a background save every 100
and, after every 100, loader workers that are ended and started anew at the same place of the data. A watcher outside
reads /proc of torchrun and everything below it once every ten steps. Heap is RssAnon: what a process allocated for
itself, without pages of files that the kernel may drop at any time. Compared are medians: steps 200 to 400 against
the last 200. A process that writes a checkpoint lives for one save: it is looked at twenty times a second, and the
most that any of a save held is compared, the first five saves after step 200 against the last five. Exit code 1 if a
heap grew by 2 % or more, or if any other process holds more descriptors at the end.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from timing import Cell, Table, argument_parser, environment, publish

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WARM_STEPS, WINDOW, LARGEST_GROWTH = 200, 200, 0.02
SAMPLE_EVERY, RESTART_EVERY, SAVE_EVERY, EVALUATE_EVERY = 10, 100, 100, 50
NUM_SAVES = 5
WRITERS = "largest writer"
FEW_DESCRIPTORS = 10  # a fork that is about to become a loader worker has closed its rank's hundred
_RANK_MODE = "--as-a-rank"


@dataclass(frozen=True)
class Sample:
    """One kind of process at one step: how many there are, and what they hold together."""

    step: int
    role: str
    processes: int
    heap_bytes: int
    descriptors: int
    threads: int


def run_as_rank(flags: list[str]) -> None:
    """The program itself; its loader's workers are ended and started anew every `RESTART_EVERY` steps."""
    from megatron_cp.mcore import cpu
    from megatron_cp.mcore.versions import compat

    compat.silence_known_warnings()
    cpu.install()  # before Megatron-Core, which the loop imports
    from megatron_cp.training import loop
    from pretrain_gpt import main as pretrain

    step = loop._step

    def step_and_restart(run: loop.Run) -> None:
        step(run)
        if run.state.iteration % RESTART_EVERY == 0:
            run.loaders.train.load_state_dict(run.loaders.train.state_dict())

    loop._step = step_and_restart
    sys.argv = ["pretrain_gpt.py", *flags]
    pretrain()


def start(steps: int, folder: Path) -> subprocess.Popen[bytes]:
    """Starts torchrun on this file; run, temporary files and output are in `folder`."""
    from tests.training.commands import DATA, MODEL, environment

    flags = [
        *MODEL, *DATA, "--num-workers", "1", "--micro-batch-size", "1", "--global-batch-size", "2",
        "--context-parallel-size", "2", "--train-iters", str(steps), "--lr", "1e-3", "--log-interval", "10",
        "--eval-interval", str(EVALUATE_EVERY), "--eval-iters", "2", "--split", "8,1,1", "--save", str(folder / "run"),
        "--save-interval", str(SAVE_EVERY), "--async-save", "--no-wandb",
    ]  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(Path(__file__).resolve()), _RANK_MODE]
    temporary = folder / "temporary"
    temporary.mkdir()
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [*command, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(str(temporary)),
        )


def watch(launcher: subprocess.Popen[bytes], folder: Path) -> list[Sample]:
    """Returns what all processes of the run held, every `SAMPLE_EVERY` steps until it ends."""
    samples: list[Sample] = []
    seen = 0
    while launcher.poll() is None:
        step = _last_step(folder / "run" / "metrics.jsonl")
        samples += look(launcher.pid, step, writers=True)
        if step >= seen + SAMPLE_EVERY:
            seen = step - step % SAMPLE_EVERY
            samples += look(launcher.pid, step)
            _drop_old_checkpoints(folder / "run")
        time.sleep(0.05)
    return samples


def look(launcher: int, step: int, *, writers: bool = False) -> list[Sample]:
    """Returns one sample for each kind of process below torchrun, torchrun included.

    Or, with `writers`, of the largest process that writes a checkpoint of each rank.
    """
    held: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for pid, role in _roles(launcher).items():
        if role.startswith(WRITERS) != writers:
            continue
        try:
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            heap = int(status["RssAnon"].split()[0]) * 1024
        except (OSError, KeyError):  # it ended meanwhile
            continue
        if not writers or descriptors > FEW_DESCRIPTORS:
            held[role].append((heap, descriptors, int(status["Threads"])))
    together = max if writers else sum
    return [
        Sample(step, role, len(values), *(together(column) for column in zip(*values, strict=True)))
        for role, values in held.items()
    ]


def _roles(launcher: int) -> dict[int, str]:
    """What every process of the run is; one that writes a checkpoint is a fork of its rank, or of such a one."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                children[int((path / "stat").read_text().rpartition(")")[2].split()[1])].append(
                    int(path.name)
                )
            except OSError:
                continue
    roles = {launcher: "torchrun"}
    for rank in children[launcher]:
        name = f"rank {_variable(rank, 'RANK')}"
        roles[rank] = name
        waiting, own = list(children[rank]), _command(rank)
        while waiting:
            pid = waiting.pop()
            waiting += children[pid]
            kind = WRITERS if (command := _command(pid)) == own else "other helpers"
            roles[pid] = f"{'loader workers' if 'data.worker' in command else kind} of {name}"
    return roles


def _variable(pid: int, name: str) -> str:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return "?"
    return next((pair.partition("=")[2] for pair in pairs if pair.startswith(f"{name}=")), "?")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _last_step(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as rows:
        rows.seek(max(0, path.stat().st_size - 4096))
        lines = rows.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            return int(json.loads(line)["iteration"])
        except (ValueError, KeyError):  # a line that is being written, or a cut one
            continue
    return 0


def _drop_old_checkpoints(folder: Path) -> None:
    """Keeps the disk small; the newest two stay."""
    kept = sorted(folder.glob("iter_*"))[:-2]
    for path in kept:
        shutil.rmtree(path, ignore_errors=True)


def judge(samples: list[Sample]) -> tuple[list[list[Cell]], list[str]]:
    """Returns the table's rows, one per kind of process, and what is not flat."""
    last = max(sample.step for sample in samples)
    rows: list[list[Cell]] = []
    wrong: list[str] = []
    for role in sorted({sample.role for sample in samples}):
        own = [sample for sample in samples if sample.role == role]
        early = [s for s in own if WARM_STEPS <= s.step < WARM_STEPS + WINDOW]
        late = [s for s in own if s.step > last - WINDOW]
        if role.startswith(WRITERS):
            early, late = of_saves(own)
        if not early or not late or role.startswith("other"):
            continue  # what lives for one save only
        heaps = [statistics.median(s.heap_bytes for s in part) for part in (early, late)]
        files = [statistics.median(s.descriptors for s in part) for part in (early, late)]
        threads = [statistics.median(s.threads for s in part) for part in (early, late)]
        growth = heaps[1] / heaps[0] - 1
        if growth >= LARGEST_GROWTH:
            wrong.append(f"{role}: heap grew by {growth:.1%}")
        if files[1] > files[0] and not role.startswith(WRITERS):  # which inherit their rank's
            wrong.append(f"{role}: {files[1]:.0f} descriptors, {files[0]:.0f} before")
        rows.append(
            [role, heaps[0] / 2**20, heaps[1] / 2**20, 100 * growth]
            + [f"{first:.0f} / {second:.0f}" for first, second in (files, threads)]
        )
    return rows, wrong


def of_saves(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Returns the most that was seen in each of the first saves after the start, and in each of the last."""
    by_save: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.step >= WARM_STEPS:
            by_save[sample.step // SAVE_EVERY].append(sample)
    saves = [
        Sample(
            seen[0].step,
            seen[0].role,
            *(max(column) for column in zip(*map(_amounts, seen), strict=True)),
        )
        for _, seen in sorted(by_save.items())
    ]
    return saves[:NUM_SAVES], saves[-NUM_SAVES:]


def _amounts(sample: Sample) -> tuple[int, int, int, int]:
    return sample.processes, sample.heap_bytes, sample.descriptors, sample.threads


def main() -> int:
    """Prints the table; returns 1 if the run failed or something grew."""
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    os.nice(10)
    facts = environment(("numpy", "torch", "megatron-core"))
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        launcher = start(arguments.steps, folder)
        samples = watch(launcher, folder)
        if launcher.returncode:
            print((folder / "output").read_text()[-9000:], file=sys.stderr)
            return 1
        minutes = (time.monotonic() - began) / 60
    rows, wrong = judge(samples)
    columns = [
        "process",
        "heap MiB, steps 200-400",
        "last 200",
        "growth %",
        "descriptors",
        "threads",
    ]
    count = arguments.steps
    note = (
        f"{count} steps with {count // SAVE_EVERY} background saves, {count // EVALUATE_EVERY} evaluations and "
        f"{count // RESTART_EVERY} restarts of the training loader's workers on each of two gloo ranks, in "
        f"{minutes:.0f} minutes. Medians; `a / b` is before and at the end. A rank's workers are counted together; "
        "of its writers the largest of each save, the first five saves after step 200 against the last five."
    )
    table = Table("What each process holds", columns, rows, note)
    details = [vars(sample) for sample in samples if sample.step % 50 < SAMPLE_EVERY]
    publish("A long run", facts, [table], arguments.output, details)
    print("\n".join(wrong) or "flat", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == [_RANK_MODE]:
        run_as_rank(sys.argv[2:])
    else:
        raise SystemExit(main())
