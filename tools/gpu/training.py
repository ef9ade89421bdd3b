"""Small training runs on one GPU: do they end, and does a layout train as one rank does?

Ranks are processes on the one GPU, each a machine of its own for NCCL (ranks.py says why); several runs go side by
side, so their times say nothing. A run that does not end is aborted, and the stacks of its ranks stand in its log.
"""

import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0  # of one run, beside others
STEPS = 8
RANKS_AT_ONCE = 12
# How far the first loss, and (relative) gradient norm, may be from those of one rank: bf16 sums in another order.
FIRST = {"lm loss": 4e-4, "grad-norm": 1e-2}
SECONDS_OF_OTHERS = 8.0  # what ranks get to say why, when one has failed
FRAMES = 8  # of the stack of a run that did not end, innermost first

MODEL = (
    "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"
)
DATA = "--mock-data --vocab-size 4096 --seq-length 8192 --reset-attention-mask --reset-position-ids --num-workers 1"
LOOP = (
    f"--micro-batch-size 1 --global-batch-size 2 --train-iters {STEPS} --lr 2e-4 --bf16 --calculate-per-token-loss "
    "--log-interval 1 --eval-interval 100 --eval-iters 1 --no-wandb --distributed-timeout-minutes 2"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 704 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2"
LINEAR = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 128 "
    "--linear-value-head-dim 128 --linear-num-key-heads 4 --linear-num-value-heads 8"
)
LATENT = "--multi-latent-attention --kv-lora-rank 256 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
FP16 = "--fp16 --initial-loss-scale 1"
# Ranks without a GPU: is what stands here a command that runs at all?
SMALL = shlex.split(
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --vocab-size 512 --seq-length 256"
)
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"


@dataclass(frozen=True)
class Job:
    """A run: its ranks, its flags, and the run whose losses it must repeat, each within `most` of them.

    The first loss and gradient norm are those of the same weights and tokens, and must be closer (FIRST).
    """

    ranks: int
    flags: str
    like: str = ""
    most: float = 2e-3
    without: tuple[str, ...] = ()  # flags of MODEL, DATA and LOOP to leave out, with their values
    on_cpu: bool = True  # what a CPU cannot do is left out there

    def goes_on_from(self) -> list[str]:
        """Returns the runs whose folders its flags name."""
        return [other for other in JOBS if "{" + other + "}" in self.flags]


# Weights drawn by stages, tensor and expert ranks are others than those of one rank: these are compared with their own
# kind without context parallelism.
JOBS: Mapping[str, Job] = {
    "one rank": Job(1, "--save {run} --save-interval 4"),
    "one rank again": Job(1, "", "one rank"),  # what the order of atomic sums alone does
    "CP 2": Job(2, CP2, "one rank"),
    "CP 4": Job(4, CP4, "one rank"),
    "resumed at CP 2, saved in the background": Job(
        2,
        f"{CP2} --load {{one rank}} --ckpt-step 4 --save {{run}} --save-interval 2 --async-save",
        "one rank",
    ),
    "flash backend": Job(1, "--cp-backend flash", "one rank", on_cpu=False),
    "flex backend, CP 2": Job(2, f"{CP2} --cp-backend flex", "one rank", on_cpu=False),
    "profile, memory, energy, stragglers": Job(
        1,
        "--profile --profile-step-start 4 --profile-step-end 5 --use-pytorch-profiler --log-straggler --log-energy "
        "--record-memory-history --memory-snapshot-path {run}/memory.pickle --tensorboard-dir {run}/tensorboard",
        "one rank",
        on_cpu=False,
    ),
    "replicas, sharded optimizer": Job(
        2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "one rank"
    ),
    "packs of replicas together": Job(4, f"{CP2} --hybrid-context-parallel", "one rank"),
    "recomputed": Job(
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "one rank",
    ),
    "logits and MLPs in chunks": Job(
        1, "--loss-chunk-size 1024 --mlp-chunks-for-training 4", "one rank"
    ),
    "recomputed from the host, CP 2, in chunks": Job(
        2,
        f"{CP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--offload-recompute-inputs --loss-chunk-size 1024 --mlp-chunks-for-training 4",
        "one rank",
    ),
    "TP 2": Job(2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "TP 2, CP 2": Job(4, f"--tensor-model-parallel-size 2 --sequence-parallel {CP2}", "TP 2"),
    "PP 2": Job(2, "--pipeline-model-parallel-size 2"),
    "PP 2, CP 2": Job(4, f"--pipeline-model-parallel-size 2 {CP2}", "PP 2"),
    "PP 2 interleaved, CP 2": Job(
        4, f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {CP2}"
    ),
    "dropout of attention": Job(1, "--attention-dropout 0.1", without=("--attention-dropout",)),
    "dropout of attention, CP 2": Job(
        2,
        f"--attention-dropout 0.1 {CP2}",
        "dropout of attention",
        without=("--attention-dropout",),
    ),
    "dropout of attention, flex": Job(
        1,
        "--attention-dropout 0.1 --cp-backend flex",
        "dropout of attention",
        without=("--attention-dropout",),
        on_cpu=False,
    ),
    "window and sinks": Job(
        1, "--window-size 512,0 --window-attn-skip-freq 2 --softmax-type learnable"
    ),
    "window and sinks, CP 2": Job(
        2,
        f"--window-size 512,0 --window-attn-skip-freq 2 --softmax-type learnable {CP2}",
        "window and sinks",
    ),
    "latent attention": Job(1, LATENT, without=("--group-query-attention", "--num-query-groups")),
    "latent attention, CP 2": Job(
        2,
        f"{LATENT} {CP2}",
        "latent attention",
        without=("--group-query-attention", "--num-query-groups"),
    ),
    "experts": Job(1, EXPERTS),
    "experts, CP 2": Job(2, f"{EXPERTS} {CP2}", "experts", most=1e-2),
    "gated delta nets": Job(1, LINEAR),
    "gated delta nets, CP 2": Job(2, f"{LINEAR} {CP2}", "gated delta nets"),
    "fp16": Job(1, FP16, without=("--bf16",)),
    "fp16, CP 2": Job(2, f"{FP16} {CP2}", "fp16", without=("--bf16",)),
    "muon": Job(1, "--optimizer muon --muon-momentum 0.95"),
    "muon, CP 2": Job(2, f"--optimizer muon --muon-momentum 0.95 {CP2}", "muon"),
}

QUICK = ("one rank", "CP 2", "PP 2", "PP 2, CP 2")


def run_all(
    folder: Path, seconds: float, names: Sequence[str] = (), small: bool = False
) -> dict[str, tuple[str, str]]:
    """Returns (ok or FAILED, words) of each run, within so many seconds together.

    `names` are runs of JOBS, all by default; those that they are compared with or go on from run too. What each run
    leaves is in `folder`, under its name. `small` runs tiny models on CPU ranks.
    """
    wanted = {name: JOBS[name] for name in _with_needed(names) if JOBS[name].on_cpu or not small}
    deadline, room = time.monotonic() + seconds, _Room(RANKS_AT_ONCE)
    ended = {name: threading.Event() for name in wanted}
    codes: dict[str, str] = {}

    def run(name: str) -> None:
        job = wanted[name]
        try:
            for other in job.goes_on_from():
                ended[other].wait()
            with room.for_ranks(job.ranks):
                limit = min(SECONDS, deadline - time.monotonic())
                codes[name] = _run(name, folder, limit, small)
        finally:
            ended[name].set()

    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(run, wanted))
    found = {name: _metrics(folder_of(name, folder)) for name in wanted}
    return {name: _verdict(name, codes[name], found) for name in wanted}


def _with_needed(names: Sequence[str]) -> list[str]:
    """Returns the runs, all or those named, with those that they need, as JOBS orders them."""
    asked = set(names or JOBS)
    while missing := {x for name in asked for x in _needs(JOBS[name])} - asked:
        asked |= missing
    return [name for name in JOBS if name in asked]


def _needs(job: Job) -> set[str]:
    return {*job.goes_on_from(), job.like} - {""}


def folder_of(name: str, folder: Path) -> Path:
    """Returns where a run leaves what it leaves."""
    return folder / "".join(c if c.isalnum() else "_" for c in name)


def flags_of(name: str, folder: Path, small: bool = False) -> list[str]:
    """Returns the command line of a run."""
    job, kept, keeps = JOBS[name], [], True
    for word in shlex.split(f"{MODEL} {DATA} {LOOP}"):
        keeps = word not in job.without if word.startswith("--") else keeps
        kept += [word] if keeps else []
    said = job.flags
    for one in ("run", *JOBS):
        said = said.replace("{" + one + "}", str(folder_of(name if one == "run" else one, folder)))
    return [
        *kept,
        *shlex.split(said),
        "--run-dir",
        str(folder_of(name, folder)),
        *(SMALL if small else ()),
    ]


def _run(name: str, folder: Path, seconds: float, small: bool) -> str:
    """Runs all ranks; returns "" if all ended well, else what went wrong."""
    own, job = folder_of(name, folder), JOBS[name]
    logs = own.with_name(f"{own.name}_logs")
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags_of(name, folder, small)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    place |= {"WORLD_SIZE": str(job.ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"NCCL_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
    place["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    processes = []
    for rank in range(job.ranks):
        environment = os.environ | place | {"RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"}
        with (logs / f"rank{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(command, cwd=own.parent, stdout=log, stderr=log, env=environment)
            )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(code == 0 for code in _codes(processes)):
        if any(_codes(processes)):
            _wait_for_others(processes)  # they may say why
            break
        time.sleep(0.2)
    codes, files = _codes(processes), [logs / f"rank{rank}.log" for rank in range(job.ranks)]
    words = [_last_words(log) for log in files]
    _end(processes)
    if not any(code != 0 for code in codes):
        return ""
    if any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        return f"rank {rank} ended with {codes[rank]}: {words[rank]}"
    places = "; ".join(f"rank {rank} in {_place(log)}" for rank, log in enumerate(files))
    return f"did not end: {words[0]}; {places}"


def _codes(processes: Sequence["subprocess.Popen[bytes]"]) -> list[int | None]:
    return [process.poll() for process in processes]


def _wait_for_others(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Returns once all have ended, and after `SECONDS_OF_OTHERS` at the latest."""
    deadline = time.monotonic() + SECONDS_OF_OTHERS
    while time.monotonic() < deadline and None in _codes(processes):
        time.sleep(0.05)


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ends what still runs: SIGABRT first, on which Python writes the stacks of all threads."""
    for code in (signal.SIGABRT, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                process.send_signal(code)
        _wait_for_others(processes)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    wrong = [line for line in lines if "rror" in line] or lines
    return wrong[-1][:300] if wrong else "nothing was said"


def _place(log: Path) -> str:
    """Returns the innermost lines of the main thread, as Python wrote them when it was aborted."""
    _, _, stack = log.read_text(errors="replace").partition("Current thread ")
    frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', stack)
    return (
        " < ".join(f"{name}:{line} {function}" for name, line, function in frames[:FRAMES])
        or "no line"
    )


Metrics = dict[int, dict[str, float]]


def _metrics(folder: Path) -> Metrics:
    """Returns loss and gradient norm of each step that was recorded."""
    try:
        rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        return {}
    return {row["iteration"]: row for row in rows if "lm loss" in row}


def _verdict(name: str, wrong: str, found: Mapping[str, Metrics]) -> tuple[str, str]:
    """Returns (ok or FAILED, words): the run ended, its losses are numbers, and those of the run it repeats."""
    own, job = found[name], JOBS[name]
    losses = {step: float(row["lm loss"]) for step, row in own.items()}
    if wrong or STEPS not in losses:
        return "FAILED", wrong or f"losses were written of steps {sorted(losses)} alone"
    if not all(math.isfinite(loss) for loss in losses.values()):
        return "FAILED", f"losses {losses}"
    first = min(losses)
    words = f"loss {losses[first]:.4f} at step {first}, {losses[STEPS]:.4f} at step {STEPS}"
    if not job.like:
        return "ok", words
    other = found[job.like]
    if missing := [step for step in losses if step not in other]:
        return "FAILED", f"{words}; {job.like!r} has no steps {missing}"
    apart = max(abs(loss - other[step]["lm loss"]) for step, loss in losses.items())
    words += f", within {apart:.1e} of {job.like!r} (at most {job.most:.0e})"
    is_close = apart <= job.most
    for key, most in FIRST.items():
        one, two = own[first][key], other[first][key]
        away = abs(one - two) / (abs(two) if key == "grad-norm" else 1.0)
        words += f", first {key} {away:.1e} (at most {most:.0e})"
        is_close &= away <= most
    return "ok" if is_close else "FAILED", words


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class _Room:
    """Lets runs begin while their ranks together are not too many, in the order in which they came.

    Without that order small runs would take each place that falls free, and large ones would wait for the last of them.
    """

    def __init__(self, ranks: int):
        self._free, self._changed = ranks, threading.Condition()
        self._waiting: list[object] = []

    @contextmanager
    def for_ranks(self, ranks: int) -> Iterator[None]:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and self._free >= ranks)
            self._waiting.remove(ticket)
            self._free -= ranks
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += ranks
                self._changed.notify_all()
