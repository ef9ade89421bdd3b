"""The CPU stand-ins: Megatron's random streams work, and CUDA machines are left alone."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from megatron_cp.mcore.versions import compat
from tests.mcore.tiny_gpt import Case, build_chunks, make_config, parallel_state
from tests.processes import HANG_SECONDS
from tests.ranks import run_on_ranks


def _initial_weights(rank, world_size, use_cpu_initialization):
    """Whole weights as Megatron draws them, gathered over tensor-parallel ranks."""
    case = Case(tp=world_size).with_options(use_cpu_initialization=use_cpu_initialization)
    with parallel_state(case) as groups:
        from tests.mcore import tiny_gpt

        config = make_config(case)
        fill, tiny_gpt.fill_by_name = tiny_gpt.fill_by_name, lambda model: None
        try:
            (model,) = build_chunks(case, config)
        finally:
            tiny_gpt.fill_by_name = fill
        weights = {}
        for name, parameter in model.named_parameters():
            parts = [torch.zeros_like(parameter) for _ in range(world_size)]
            torch.distributed.all_gather(
                parts, parameter.data.contiguous(), group=groups.get_tensor_model_parallel_group()
            )
            split = getattr(parameter, "tensor_model_parallel", False)
            weights[name] = torch.cat(parts, parameter.partition_dim) if split else parts
        return weights


def test_initial_weights_do_not_depend_on_the_tensor_parallel_size():
    (one,) = run_on_ranks(1, _initial_weights, True)
    two = run_on_ranks(2, _initial_weights, True)[0]
    for name, weight in one.items():
        if isinstance(weight, list):  # replicated: the same on every rank
            assert all(torch.equal(part, weight[0]) for part in two[name]), name
        else:
            assert torch.equal(two[name], weight), name


def test_weights_drawn_on_the_device_differ_between_tensor_parallel_ranks():
    two = run_on_ranks(2, _initial_weights, False)[0]
    split = {name: weight for name, weight in two.items() if not isinstance(weight, list)}
    assert split
    for name, weight in split.items():
        if weight.std() > 0:  # not a bias
            first, second = weight.chunk(2, dim=1 if "linear_proj" in name or "fc2" in name else 0)
            assert not torch.equal(first, second), f"{name}: both ranks drew the same numbers"


def _dropout_streams(rank, world_size):
    with parallel_state(Case(tp=world_size)):
        from megatron.core import tensor_parallel

        ones = torch.ones(64)
        shared = torch.nn.functional.dropout(ones, 0.5)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            own = torch.nn.functional.dropout(ones, 0.5)
        shared_again = torch.nn.functional.dropout(ones, 0.5)
        return shared.tolist(), own.tolist(), shared_again.tolist()


def test_tensor_parallel_ranks_share_the_default_stream_and_own_the_forked_one():
    (shared_0, own_0, again_0), (shared_1, own_1, again_1) = run_on_ranks(2, _dropout_streams)
    assert shared_0 == shared_1 and again_0 == again_1
    assert own_0 != own_1
    assert shared_0 != again_0, "the fork rewound the default stream"


def _train_with_dropout(rank, world_size, case):
    from tests.mcore.tiny_gpt import train

    return train(rank, world_size, case)


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputation_repeats_the_dropout_of_the_first_forward(granularity: str):
    case = Case(attention="planned", tp=2, steps=3).with_options(hidden_dropout=0.2)
    method = {"recompute_method": "uniform", "recompute_num_layers": 1}
    recomputed = case.with_options(
        recompute_granularity=granularity, **(method if granularity == "full" else {})
    )
    plain = run_on_ranks(2, _train_with_dropout, case)[0]
    repeated = run_on_ranks(2, _train_with_dropout, recomputed)[0]
    for step, values in enumerate(plain):
        assert repeated[step] == pytest.approx(values, rel=1e-6), step
    without = run_on_ranks(2, _train_with_dropout, Case(attention="planned", tp=2, steps=3))[0]
    assert without[0][0] != pytest.approx(plain[0][0], rel=1e-6), "nothing was dropped"


def _count_attention(rank, world_size, case):
    """How often attention was computed in one training step."""
    from megatron_cp.runtime import dist_attn

    plain, calls = dist_attn.attend_forward, []

    def counted(*args):
        calls.append(1)
        return plain(*args)

    dist_attn.attend_forward = counted
    try:
        _train_with_dropout(rank, world_size, case)
    finally:
        dist_attn.attend_forward = plain
    return len(calls)


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputed_layers_do_not_repeat_attention(granularity: str):
    case = Case(attention="planned", cp=2, steps=1, packed=True)
    method = {"recompute_method": "uniform", "recompute_num_layers": 1}
    recomputed = case.with_options(
        recompute_granularity=granularity, **(method if granularity == "full" else {})
    )
    plain = run_on_ranks(2, _count_attention, case)
    assert run_on_ranks(2, _count_attention, recomputed) == plain
    assert min(plain) > 0


def _run(script: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


def test_installing_after_megatron_is_refused_and_twice_is_once():
    script = """
import sys, types
from megatron_cp.mcore import cpu
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
try:
    cpu.install()
except RuntimeError as error:
    print(error)
del sys.modules["megatron.core"]
import torch
print(cpu.install(), torch.cuda.is_available())
zeros = torch.zeros
print(cpu.install(), torch.zeros is zeros, torch.zeros(2, device="cuda").device)
print(torch.ones(1).to("cuda:0").type(), torch.ones(1).cuda().pin_memory().device)
"""
    result = _run(script)
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stderr
    assert "call megatron_cp.mcore.cpu.install() before" in lines[0]
    assert lines[1:] == ["True False", "True True cpu", "torch.cuda.FloatTensor cpu"]


def test_with_cuda_nothing_is_changed():
    script = """
import torch
torch.cuda.is_available = lambda: True
before = dict(vars(torch.cuda)), torch.zeros, torch.Tensor.to, torch.Tensor.type
from megatron_cp.mcore import cpu
print(cpu.install(), cpu.is_installed())
print(before == (dict(vars(torch.cuda)), torch.zeros, torch.Tensor.to, torch.Tensor.type))
"""
    result = _run(script)
    assert result.stdout.splitlines() == ["False False", "True"], result.stderr


UNGUARDED = """
import triton
import triton.language as tl

@triton.jit
def plain(pointer, SIZE: tl.constexpr):
    tl.load(pointer)

@triton.jit(do_not_specialize=["pointer"])
def configured(pointer):
    pass
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None,
    reason="triton is installed: nothing to stand in",
)
def test_a_module_of_megatron_is_imported_without_triton_and_nobody_else_sees_the_stand_in(
    tmp_path,
):
    name = "megatron.core.transformer.moe.ops.paged_stash"
    folder = tmp_path.joinpath(*name.split(".")[:-1])
    folder.mkdir(parents=True)
    for parent in [folder, *folder.parents][:5]:
        (parent / "__init__.py").touch()
    (folder / "paged_stash.py").write_text(UNGUARDED)
    (folder / "other.py").write_text(UNGUARDED)
    script = f"""
import importlib, importlib.util, sys
sys.path.insert(0, {str(tmp_path)!r})
from megatron_cp.mcore.versions import triton_free
print(triton_free.install(), triton_free.install())
kernels = importlib.import_module({name!r})
for kernel in (kernels.plain, kernels.configured):
    try:
        kernel[(1,)](None)
    except RuntimeError as error:
        print(error)
for module in ("triton", {name.replace("paged_stash", "other")!r}):
    try:
        importlib.import_module(module)
    except ImportError as error:
        print("ImportError", error.name)
from torch.utils._triton import has_triton_package
print(importlib.util.find_spec("triton"), has_triton_package(), "triton" in sys.modules)
"""
    result = _run(script)
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stderr
    assert lines[0] == "True True"
    assert "kernel plain was launched" in lines[1] and "kernel configured was" in lines[2]
    assert lines[3:] == ["ImportError triton", "ImportError triton", "None False False"]


def test_a_device_context_holds_and_no_compiler_is_imported_beside_the_stand_ins():
    script = """
import sys, torch
from megatron_cp.mcore import cpu
cpu.install()
with torch.device('meta'): print(torch.arange(3).device, torch.zeros(2).device)
def double(x, by=2): return by * x
plain, marked = torch.compile(double), torch.compile(dynamic=True)(double)
print(plain is marked is double, torch.nn.Linear(1, 1).compile())
import megatron.core
print("torch._inductor.compile_fx" in sys.modules)
"""
    done = _run(script)
    assert done.stdout.split() == ["meta", "meta", "True", "None", "False"], done.stderr


class _OfNewerVersions:
    """How 0.20 has the checkpoint of a norm, whose callers say nothing of fp8."""

    def __init__(self, fp8=False, ckpt_manager=None, retain_input_tensors=False):
        self.fp8 = fp8 is not None


def test_a_norm_is_recomputed_without_transformer_engine(monkeypatch):
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "CheckpointWithoutOutput", _OfNewerVersions)
    compat.repair_megatron()
    compat.repair_megatron()  # once more changes nothing
    assert not _OfNewerVersions().fp8
    assert _OfNewerVersions(True).fp8
