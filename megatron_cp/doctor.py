"""What is installed here, what works, and whether training can run.

Versions come from package metadata; what must be tried is tried in a process of its own, so that a
crash (Transformer Engine and the index's apex break Megatron-Core's import on a CPU) is a finding
and not the end.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

State = Literal["ok", "note", "fail"]

_MARKS: dict[State, str] = {"ok": "ok", "note": "--", "fail": "NO"}
_NEEDED = ("megatron-core", "numpy", "psutil", "tokenizers", "torch")
# Training goes on without them.
_OPTIONAL = ("wandb", "tqdm")
_BREAKS_CPU_IMPORT = ("transformer-engine", "apex")

MEGATRON_PROBE = """
import warnings; warnings.simplefilter("ignore")
from megatron_cp.mcore import cpu; cpu.install()
import megatron_cp.mcore.spec
"""
COLLECTIVE_PROBE = """
import torch, torch.distributed as dist
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
rows = torch.arange(3.0, device={device!r}); out = torch.zeros_like(rows)
dist.all_to_all_single(out, rows)
assert out.tolist() == [0.0, 1.0, 2.0], out
dist.destroy_process_group()
"""
GPU_PROBE = """
import torch, torch.distributed as dist
cuda = torch.cuda
names = [cuda.get_device_name(i) + " sm_%d%d" % cuda.get_device_capability(i)
         for i in range(cuda.device_count())] if cuda.is_available() else []
print(", ".join(names), "NCCL" if dist.is_nccl_available() else "", torch.version.cuda or "", sep="|")
"""


# Which backend a training run would take on each GPU, and why none that is faster.
BACKEND_PROBE = """
import warnings; warnings.simplefilter("ignore")
import torch
from megatron_cp.attn.choice import tell_choice
print("; ".join(tell_choice(torch.device("cuda", i)) for i in range(torch.cuda.device_count())))
"""
# The smallest kernel there is.
KERNEL_PROBE = """
from megatron_cp.kernels.driver import driver
from megatron_cp.kernels.loading import load_variant
load_variant("bwd_postprocess_bf16_64", driver(), 0)
"""
# All of them against float64 on every Hopper GPU; remembered, so that the first training step finds the verdicts.
SELF_TEST_PROBE = """
import torch
from megatron_cp.attn.hopper.self_test import tell_all
gpus = [i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) == (9, 0)]
print("; ".join(f"GPU {i}: {tell_all(torch.device('cuda', i))}" for i in gpus))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the answer; "fail" means that training cannot run."""

    name: str
    state: State
    text: str


def examine() -> list[Finding]:
    """Returns all findings; tries an import of Megatron-Core and a collective, seconds each."""
    gpu, has_gpu = _gpu()
    findings = [_python(), *_packages(), *_breakers(has_gpu), gpu]
    findings.append(
        _tried("Megatron-Core", MEGATRON_PROBE, "imports with our attention swapped in")
    )
    gloo = COLLECTIVE_PROBE.format(backend="gloo", device="cpu")
    findings.append(_tried("gloo", gloo, "all-to-all on the CPU works"))
    if has_gpu:
        nccl = COLLECTIVE_PROBE.format(backend="nccl", device="cuda")
        findings.append(_tried("NCCL", nccl, "all-to-all on the GPU works"))
    return [
        *findings,
        *_kernels(" sm_90" in gpu.text),
        _cache(os.environ),
        _wandb(os.environ),
        _machine(),
    ]


def can_train(findings: Sequence[Finding]) -> bool:
    """Returns whether nothing that training needs is missing."""
    return all(finding.state != "fail" for finding in findings)


def doctor_text(findings: Sequence[Finding]) -> str:
    """Returns the findings as lines, and the verdict."""
    failed = [finding.name for finding in findings if finding.state == "fail"]
    verdict = f"training cannot run: {', '.join(failed)}" if failed else "training can run"
    return f"{findings_text(findings)}\n{verdict}"


def findings_text(findings: Sequence[Finding]) -> str:
    """Returns the findings as lines."""
    width = max(len(finding.name) for finding in findings)
    return "\n".join(
        f"{_MARKS[finding.state]:>2}  {finding.name:{width}}  {finding.text}"
        for finding in findings
    )


def _python() -> Finding:
    version = platform.python_version()
    fine = sys.version_info >= (3, 10)
    return Finding("Python", "ok" if fine else "fail", version if fine else f"{version}, need 3.10")


def _packages() -> list[Finding]:
    """Returns what our own package says that it needs, against what is there."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return _packages_by_name()
    try:
        needs = [Requirement(text) for text in metadata.requires("megatron_cp") or ()]
        findings = [Finding("megatron_cp", "ok", metadata.version("megatron_cp"))]
    except metadata.PackageNotFoundError:
        needs = [Requirement(name) for name in _NEEDED]
        words = "runs from its source folder, so versions are not checked; pip install ."
        findings = [Finding("megatron_cp", "note", words)]
    for need in sorted(needs, key=lambda one: one.name):
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        version = _version(need.name)
        fine = version is not None and need.specifier.contains(version, prereleases=True)
        missing: State = "note" if need.name in _OPTIONAL else "fail"
        words = version or "is not installed"
        if not fine:
            words += (
                f"; need {need.name}{need.specifier}: pip install '{need.name}{need.specifier}'"
            )
        findings.append(Finding(need.name, "ok" if fine else missing, words))
    return findings


def _packages_by_name() -> list[Finding]:
    """Returns which of the packages are there, where nothing can compare versions."""
    words = "versions are not checked without the package packaging; pip install ."
    findings = [Finding("megatron_cp", "note", words)]
    for name in (*_NEEDED, *_OPTIONAL):
        version = _version(name)
        missing: State = "note" if name in _OPTIONAL else "fail"
        said = version or f"is not installed: pip install {name}"
        findings.append(Finding(name, "ok" if version else missing, said))
    return findings


def _breakers(has_gpu: bool) -> list[Finding]:
    findings = []
    for name in _BREAKS_CPU_IMPORT:
        version = _version(name)
        words = "not installed; not needed" if version is None else version
        if version is not None and not has_gpu:
            words += "; known to break Megatron-Core's import without a GPU: pip uninstall it there"
        findings.append(Finding(name, "note", words))
    return findings


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def run_probe(code: str) -> tuple[bool, str]:
    """Returns whether Python ran `code` in a fresh process, and its last line of output or error."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return False, " ".join(str(problem).split())[-200:]
    output = done.stdout if done.returncode == 0 else done.stderr
    lines = [line for line in output.splitlines() if line.strip()]
    return done.returncode == 0, lines[-1].strip() if lines else ""


def _tried(name: str, code: str, words: str) -> Finding:
    works, last = run_probe(code)
    return Finding(name, "ok" if works else "fail", words if works else f"does not work: {last}")


def _gpu() -> tuple[Finding, bool]:
    works, last = run_probe(GPU_PROBE)
    if not works:
        return Finding("GPU", "note", f"torch cannot say: {last}"), False
    names, nccl, cuda = last.split("|")
    if not names:
        build = f"torch is built for CUDA {cuda}" if cuda else "torch is a CPU build"
        return Finding("GPU", "note", f"none ({build}); training runs on CPU ranks"), False
    return Finding("GPU", "ok", f"{names}, CUDA {cuda}, {nccl or 'no NCCL'}"), True


def _kernels(has_hopper: bool) -> list[Finding]:
    """Which backend computes attention; whether the Hopper kernels can be had: driver, compilers, cubins, verdicts."""
    from megatron_cp.kernels.loading import answers

    said = answers()
    findings = [
        Finding(one.part, "ok" if one.is_fine else "note", " ".join(one.words.split()))
        for one in said
    ]
    if not said[0].is_fine:  # no driver
        return findings
    works, chosen = run_probe(BACKEND_PROBE)
    if chosen:  # some GPU is shown
        findings.append(Finding("attention", "ok" if works else "note", chosen))
    if has_hopper:
        works, last = run_probe(KERNEL_PROBE)
        words = "one was loaded onto the GPU" if works else f"do not load: {last}"
        findings.append(Finding("Hopper kernels", "ok" if works else "note", words))
        if works:
            works, last = run_probe(SELF_TEST_PROBE)
            findings.append(Finding("self-test", "ok" if works else "note", last))
    return findings


def _cache(environment: Mapping[str, str]) -> Finding:
    """Whether compiled files could be kept: a folder of the user's own that others cannot write."""
    root = environment.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    folder = Path(root) / "megatron_cp"
    nearest = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Finding("cache", "note", f"{nearest} is not writable; set XDG_CACHE_HOME")
    status = nearest.stat()
    if folder.exists() and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return Finding("cache", "note", f"{folder} can be changed by others; chmod 700 it")
    state = "is yours" if folder.exists() else "can be made"
    return Finding("cache", "ok", f"{folder} {state}")


def _wandb(environment: Mapping[str, str]) -> Finding:
    if _version("wandb") is None:
        return Finding("wandb mode", "note", "runs are not tracked; run.json and metrics.jsonl are")
    try:
        from megatron_cp.training.logging.wandb_run import wandb_mode
    except ImportError as problem:
        return Finding("wandb mode", "note", f"cannot say: {problem}")
    words = {
        "online": "online: a key was found",
        "offline": "offline, nothing is asked: no key, or WANDB_MODE says so; upload with wandb sync",
        "disabled": "disabled by the environment",
    }
    return Finding("wandb mode", "ok", words[wandb_mode(environment)])


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0))
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Finding("machine", "ok", f"{platform.platform()}, {cores} cores, {gigabytes:.0f} GB")
