"""One command for an H100 or H200: build, values, speed, two ranks, sanitizer.

    python tools/gpu_check.py --output results/h200                 everything that fits in ten minutes
    python tools/gpu_check.py --output results/h200 --part speed    one part per invocation
    python tools/gpu_check.py --output results/h200 --quick         a few minutes: is it right, is it fast
    python tools/gpu_check.py --output results/h200 --jobs 6        values and sanitizers in six processes
    python tools/gpu_check.py --output results/h200 --part dims --cases "causal 32K D=64"
    python tools/gpu_check.py --output results/h200 --part training --runs "PP 2, CP 2" experts

Parts, in order:
    build      every variant of the kernels, several at a time
    values     small shapes of every variant and mask kind against float64, results poisoned, same bits twice
    calls      a CUDA graph, two streams, torch.compile, beside the flash backend, host time
    speed      masks x lengths, GQA 64:8, D=128, bf16, interleaved with cuDNN, FlashAttention-2, FlexAttention and
               FA3, FA4 when importable; the bars for an H200 and the kernel model's prediction beside them
    dims       head dims 64, 96, 192, 256 and 192/128
    stages     passes that add to others beside passes alone, rows joined beside a copy
    ranks      two and four ranks on this one GPU, gloo and NCCL: values, traces, every planner
    linear     linear attention in plain torch and by flash-linear-attention where that is, sparse attention: values,
               time, memory
    rope       RoPE in one kernel of torch.compile, beside Megatron-Core's operations one by one: values, time
    training   small runs with megatron-core in all layouts, side by side: losses those of one rank (the same model)
    sanitize   compute-sanitizer on tiny cases, each in a process of its own: what memcheck finds is a failure; reports
               of racecheck and synccheck are printed and kept as notes

A wrong value, a missing GPU or compiler, a failed build stop it with the reason, in the page too; a part that
runs out of time or hangs says so. Needs Python >= 3.10, torch with CUDA (it brings NVRTC) or nvcc, no network.
Writes `<output>_<part>_<date>.md` and `.json`. Nothing of the GPU's settings is touched.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_cp.attn.hopper import self_test
from megatron_cp.kernels import compilers
from tools.gpu import cases, measure, sanitizer, training, values
from tools.gpu.check import PARTS, SECONDS, Check, Wishes, say
from tools.gpu.report import Report
from tools.gpu.watchdog import StopError, Watchdog


def require_gpu() -> dict[str, str]:
    """Returns what the page says of the machine. Raises StopError without a GPU of capability 9.0."""
    if not torch.cuda.is_available():
        raise StopError(
            f"torch {torch.__version__} sees no CUDA device; run this on an H100 or H200"
        )
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        found = (
            f"{torch.cuda.get_device_name()} of compute capability {capability[0]}.{capability[1]}"
        )
        raise StopError(f"{found}; the kernels are for 9.0 (H100, H200)")
    return {
        "gpu": torch.cuda.get_device_name(),
        "clocks at the start": str(measure.clocks()),
        "software": f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}",
    }


@contextmanager
def written(report: Report, path: Path) -> Iterator[None]:
    """Writes the report whatever happens, and turns StopError and Ctrl-C into its reason."""
    try:
        yield
    except KeyboardInterrupt:
        report.stopped = "interrupted; what stands here was done before"
        say(report.stopped)
    except (StopError, compilers.CompileError, compilers.NoCompilerError) as error:
        report.stopped = str(error)
        say(f"stopped: {report.stopped}")
    finally:
        report.write(path)
        say(f"wrote {path}.md and {path}.json")


def _give_up(report: Report, path: Path, why: str) -> None:
    """Writes what there is and ends the process at once: nothing else ends a hanging GPU call."""
    report.stopped = why
    report.write(path)
    say(f"stopped: {why}")
    os._exit(3)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    parser.add_argument("--quick", action="store_true", help="fewer masks, lengths and sanitizers")
    parser.add_argument(
        "--without-model", action="store_true", help="no figures of the kernel model beside times"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_check"), help="path without suffix"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that share values, and sanitizers, out"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the time it may take")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--share", type=values.read_share, default=values.WHOLE, help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=training.JOBS,
        default=(),
        help="of training; all if none is named",
    )
    known = [case.name for case in (*cases.grid(), *cases.dims())]
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=known,
        default=(),
        metavar="CASE",
        help="of speed and dims, without FlexAttention; all if none is named",
    )
    return parser


@self_test.skipped()  # values are judged here, with more masks, and written down
def main() -> int:
    """Runs the parts asked for; returns 0 if nothing stopped them."""
    options = _parser().parse_args()
    if options.tiny:
        sanitizer.run_tiny(options.share)
        return 0
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    facts = {"date": date, "command": f"python tools/gpu_check.py --part {options.part}"}
    report = Report("Hopper kernels on a GPU", facts)
    path = options.output.with_name(f"{options.output.name}_{options.part}_{date}")
    wishes = Wishes(
        path,
        options.quick,
        options.seconds,
        not options.without_model,
        options.jobs,
        options.share,
        tuple(options.runs),
        tuple(options.cases),
    )
    with written(report, path):
        report.facts |= require_gpu()
        watchdog = Watchdog(lambda why: _give_up(report, path, why))
        check = Check(report, watchdog, wishes)
        for part in PARTS if options.part == "all" else dict.fromkeys(("build", options.part)):
            say(f"== {part}")
            getattr(check, part)()
        check.watchdog.stop()
    return 1 if report.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
