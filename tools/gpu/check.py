"""One invocation of the GPU check: its report, its clock, and its parts, one method each."""

import concurrent.futures
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_cp.kernels import build, compilers
from megatron_cp.mask import AttentionMask
from tools.gpu import (
    calls,
    cases,
    linear,
    measure,
    peers,
    predict,
    ranks,
    sanitizer,
    shares,
    sparse,
    stages,
    training,
    values,
)
from tools.gpu.report import Report, Timed
from tools.gpu.watchdog import StopError, Watchdog

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "build",
    "values",
    "calls",
    "speed",
    "dims",
    "stages",
    "ranks",
    "linear",
    "rope",
    "training",
    "sanitize",
)
SECONDS = 570.0  # an invocation ends before ten minutes
SANITIZER_SECONDS = 150
RANKS_SECONDS = 120
COMPILE_JOBS = min(16, os.cpu_count() or 1)
# FlexAttention's compilations take longer than everything else.
FLEX_LENGTHS = (32 * cases.KILO,)
QUICK_LENGTHS = (32 * cases.KILO, 8 * cases.KILO)
# How long one step may be silent: a kernel whose barriers do not fit hangs and never fails.
CHECK_SECONDS, CASE_SECONDS = 60.0, 180.0
QUICK_MASKS = tuple(cases.BARS)
QUICK_DIM_MASKS = ("causal", "causal_document")
QUICK_FLEX_MASKS = ("causal_document", "block_causal_document")


@dataclass(frozen=True)
class Wishes:
    """What an invocation was asked for."""

    path: Path = Path("gpu_check")  # of what it writes, without suffix
    quick: bool = False
    seconds: float = SECONDS
    asks_model: bool = True
    jobs: int = 1  # processes that share values, and sanitizers
    share: values.Share = values.WHOLE
    runs: tuple[str, ...] = ()  # of training; none means all
    cases: tuple[str, ...] = ()  # of speed and dims; none means all


class Check:
    """One invocation: its report, its clock, its parts."""

    def __init__(self, report: Report, watchdog: Watchdog, wishes: Wishes):
        self.report, self.watchdog, self.wishes = report, watchdog, wishes
        self.model, self.gpu = predict.Model({}), predict.Gpu(0, 0.0)
        self.deadline = time.monotonic() + wishes.seconds

    def build(self) -> None:
        """Compiles every variant. Raises CompileError on the first that no compiler can."""
        found = compilers.find_compilers(at_most=build.driver_major())
        self.report.facts["compiler"] = ", else ".join(compiler.name for compiler in found)
        started = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(COMPILE_JOBS) as pool:
            sizes = list(pool.map(lambda name: len(build.compiled_cubin(name)), build.variants()))
        seconds = time.monotonic() - started
        self.report.checks.append(("build", "ok", f"{len(sizes)} cubins in {seconds:.0f} s"))

    def values(self) -> None:
        """Checks small shapes. Raises StopError if any is wrong, after all have run."""
        if self.wishes.jobs > 1:
            failed = self._values_in_processes()
        else:
            failed = sum(
                self._one(*check) for check in values.checks(self.wishes.quick, self.wishes.share)
            )
        if failed:
            raise StopError(f"{failed} value checks failed; speed of a wrong kernel means nothing")

    def _values_in_processes(self) -> int:
        """Shares the variants out among processes; returns how many checks failed. Raises StopError if one stops."""
        self.watchdog.stop()  # each process has one of its own
        limit, failed = self.deadline - time.monotonic(), 0
        for checks, stopped in shares.run_all(self.wishes.jobs, self.wishes.quick, limit):
            self.report.checks += checks
            failed += sum(verdict == "FAILED" for _, verdict, _ in checks)
            if stopped and not failed:
                raise StopError(stopped)
        return failed

    def calls(self) -> None:
        """Checks graphs, streams, compiled functions. Raises StopError if any is wrong, after all have run."""
        failed = sum(self._one(name, check) for name, check in calls.checks().items())
        if failed:
            raise StopError(f"{failed} checks of calls failed")

    def stages(self) -> None:
        """Times stages beside passes; what is slow there stops nothing."""
        self._note("stages", stages.checks(), CHECK_SECONDS)

    def _note(self, what: str, checks: Mapping[str, Callable[[], str]], seconds: float) -> None:
        """Runs checks that stop nothing where they fail; how many did is a note."""
        failed = sum(self._one(name, check, seconds) for name, check in checks.items())
        if failed:
            self.report.notes.append(f"{what}: {failed} checks failed")

    def _one(self, name: str, check: Callable[[], str], seconds: float = CHECK_SECONDS) -> int:
        """Runs one check; returns 1 if it failed. Raises StopError when the device is lost or time is up."""
        self._check_time()
        self.watchdog.watch(name, seconds)
        try:
            detail = check()
            torch.cuda.synchronize()
        except AssertionError as error:
            self.report.checks.append((name, "FAILED", _one_line(error)))
            return 1
        except Exception as error:
            self.report.checks.append((name, "FAILED", _one_line(error)))
            raise StopError(f"{name}: {_one_line(error)}") from error
        self.report.checks.append((name, "ok", detail))
        return 0

    def ranks(self) -> None:
        """Runs ranks on this GPU. Raises StopError if their result is wrong."""
        self.watchdog.stop()  # they are processes with a limit of their own
        for backend, num_ranks in (("gloo", 2), ("nccl", 2), ("nccl", 4)):
            self._check_time()
            limit = min(RANKS_SECONDS, self.deadline - time.monotonic())
            traces = self.wishes.path.with_name(f"{self.wishes.path.name}_{backend}{num_ranks}")
            verdict, words = ranks.run_all(backend, traces, limit, num_ranks=num_ranks)
            self._heard(f"{num_ranks} ranks, {backend}", verdict, words)

    def linear(self) -> None:
        """Checks and times linear and sparse attention; what is wrong there stops nothing, and is none of kernels."""
        self._note("linear attention", linear.checks(), linear.SECONDS)
        self._note("sparse attention", sparse.checks(), sparse.SECONDS)

    def rope(self) -> None:
        """Checks and times RoPE in one kernel; what is wrong there says nothing of ours, and stops nothing."""
        if importlib.util.find_spec("megatron.core") is None:
            self.report.checks.append(("RoPE", "not run", "megatron-core is not installed"))
            return
        from tools.gpu import rope

        self._note("RoPE", rope.checks(), rope.SECONDS)

    def training(self) -> None:
        """Trains small models in all layouts; one that fails says nothing of the kernels, and stops nothing."""
        if importlib.util.find_spec("megatron.core") is None:
            self.report.checks.append(("training", "not run", "megatron-core is not installed"))
            return
        self.watchdog.stop()  # runs have limits of their own
        folder = self.wishes.path.with_name(f"{self.wishes.path.name}_runs").resolve()
        names = self.wishes.runs or (training.QUICK if self.wishes.quick else ())
        found = training.run_all(folder, self.deadline - time.monotonic(), names)
        for name, (verdict, words) in found.items():
            self.report.checks.append((f"training, {name}", verdict, words))
            say(f"{name}: {verdict}: {words}")

    def sanitize(self) -> None:
        """Runs the tiny cases under compute-sanitizer. Raises StopError if memcheck reports anything."""
        self.watchdog.stop()
        for tool in sanitizer.TOOLS[: 1 if self.wishes.quick else None]:
            self._check_time()
            limit = min(SANITIZER_SECONDS, self.deadline - time.monotonic())

            def run(index: int, tool: str = tool, limit: float = limit) -> tuple[str, str]:
                share = ["--tiny", "--share", f"{index}/{self.wishes.jobs}"]
                program = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), *share]
                return sanitizer.run(tool, program, limit, ROOT)

            with concurrent.futures.ThreadPoolExecutor(self.wishes.jobs) as pool:
                found = list(pool.map(run, range(self.wishes.jobs)))
            for index, (verdict, words) in enumerate(found):
                part = f", {index + 1} of {self.wishes.jobs}" if self.wishes.jobs > 1 else ""
                self._heard(f"compute-sanitizer {tool}{part}", verdict, words)

    def _heard(self, what: str, verdict: str, words: str) -> None:
        """Keeps what another program said. Raises StopError if it failed; a report is a note and goes on."""
        self.report.checks.append((what, verdict, words))
        say(f"{what}: {verdict}: {words}")
        if verdict == "reported":
            self.report.notes.append(f"{what} reported, to be read by a person: {words}")
        if verdict == "FAILED":
            raise StopError(f"{what}: {words}")

    def speed(self) -> None:
        """Times the grid."""
        self._ask_model()
        self.report.facts |= {k: f"{v:.1f}" for k, v in measure.ceilings().items()}
        for case in self._wanted(cases.grid()):
            if not self.wishes.quick or (
                case.mask_name in QUICK_MASKS and case.num_tokens in QUICK_LENGTHS
            ):
                wanted = not self.wishes.quick or case.mask_name in QUICK_FLEX_MASKS
                self._time(case, flex=wanted and case.num_tokens in FLEX_LENGTHS)

    def dims(self) -> None:
        """Times the other head dims."""
        self._ask_model()
        for case in self._wanted(cases.dims()):
            if not self.wishes.quick or (
                case.mask_name in QUICK_DIM_MASKS and case.num_tokens == 32 * cases.KILO
            ):
                self._time(case, flex=case.mask_name == "causal" and not self.wishes.quick)

    def _wanted(self, found: Iterator[cases.Case]) -> Iterator[cases.Case]:
        """Yields the cases that were named, all if none was."""
        names = self.wishes.cases
        yield from (case for case in found if not names or case.name in names)

    def _ask_model(self) -> None:
        """Asks the kernel model once, if it is here, before anything is timed."""
        if self.model.kernels or self.model.reason:
            return
        if not self.wishes.asks_model:
            self.model = predict.Model({}, "not asked")
            return
        self.model, self.gpu = predict.load_model(), measure.gpu()
        words = self.model.reason or "busy cycles from machine code; not measured"
        self.report.facts["kernel model"] = words

    def _time(self, case: cases.Case, flex: bool) -> None:
        self._check_time()
        self.watchdog.watch(case.name, CASE_SECONDS)
        mask, x = case.mask(), peers.draw(case)
        contenders = [peers.hopper(case, mask, x)]
        if contenders[0].backward is not None:
            contenders.append(peers.hopper(case, mask, x, "deterministic", deterministic=True))
        for make in peers.PEERS:
            if (flex and not self.wishes.cases) or make is not peers.flex_attention:
                contenders += self._prepared(make, case, mask, x)
        with torch.no_grad():
            for one in contenders:
                self._check_rows(one, case, mask, x)
        contenders += peers.with_features(case, mask, x)  # whose values small cases check
        before = measure.clocks()
        for kernel_pass in ("forward", "backward"):
            calls = {c.name: getattr(c, kernel_pass) for c in contenders}
            calls = {name: call for name, call in calls.items() if call is not None}
            if kernel_pass == "forward":
                calls.pop("hopper, deterministic", None)  # the forward pass always is
            if "hopper" in calls:
                modelled = predict.predicted_tflops(
                    self.model, case, kernel_pass, mask.area(), self.gpu
                )
                times = measure.interleaved(calls)
                timed = Timed(case, kernel_pass, mask.area(), times, modelled)
                self.report.timed.append(timed)
                say(
                    f"{case.name} {kernel_pass}: {timed.tflops('hopper'):.0f} TFLOP/s, {timed.verdict()}"
                )
        self.report.notes.append(f"clocks, {case.name}: before {before}, after {measure.clocks()}")

    def _prepared(
        self, make: peers.Make, case: cases.Case, mask: AttentionMask, x: peers.Inputs
    ) -> list[peers.Contender]:
        """Returns the peer, or nothing and a note: what a peer cannot do is no fault of ours."""
        try:
            contender = make(case, mask, x)
        except Exception as error:
            self.report.notes.append(f"{make.__name__} refused {case.name}: {_one_line(error)}")
            return []
        return [] if contender is None else [contender]

    def _check_rows(
        self, one: peers.Contender, case: cases.Case, mask: AttentionMask, x: peers.Inputs
    ) -> None:
        """Compares rows with float64. Raises StopError if ours are wrong, notes it if a peer's are."""
        try:
            values.check_rows(one.rows(one.forward()), (x.q, x.k, x.v), mask)
        except AssertionError as error:
            if one.name.startswith("hopper"):
                raise StopError(f"{case.name}: {_one_line(error)}") from error
            self.report.notes.append(f"{one.name} is wrong on {case.name}: {_one_line(error)}")

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise StopError("time is up; run the remaining parts with --part")


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
