"""The kernels' first call on a GPU: a few small masks against float64 on that very GPU, remembered in the cache.

A kernel that is wrong there (a driver, a compiler, a board that nobody tried) must not train a model. The test
runs once per GPU, driver and build of a variant, in a fraction of a second; its verdict is kept (verdicts.py). All
kinds passed on an H200 (2026-11-27; the kernel that merges rows and the launches of row statistics were changed since)
and, emulated, pass on a CPU (judge.py); kernels with a planted defect fail there.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from megatron_cp.attn.apart import run_apart
from megatron_cp.attn.hopper.checks import (
    DTYPES,
    find_gradient_kernels,
    find_variant,
    forward_variants,
)
from megatron_cp.attn.hopper.judge import Kind, judge
from megatron_cp.attn.hopper.rows import ADD, MERGE
from megatron_cp.attn.hopper.verdicts import Verdict, kept_verdict
from megatron_cp.kernels import build
from megatron_cp.kernels.driver import driver

TEST_VERSION = 7  # of the cases in judge.py and of the launches: verdicts of others are not asked

_is_skipped: ContextVar[bool] = ContextVar("megatron_cp_self_test_is_skipped", default=False)
_verdicts: dict[tuple[Kind, torch.device], Verdict] = {}


@contextlib.contextmanager
def skipped() -> Iterator[None]:
    """Lets kernels run untested inside: for tools that judge them themselves."""
    token = _is_skipped.set(True)
    try:
        yield
    finally:
        _is_skipped.reset(token)


def find_verdict(kind: Kind, device: torch.device) -> Verdict | None:
    """Returns the verdict on this GPU: of this process, of an earlier one, or of a test now; None if skipped.

    Raises RuntimeError where the test now ends in a fault of the GPU.
    """
    if _is_skipped.get():
        return None
    verdict = _verdicts.get((kind, device))
    if verdict is None:
        from megatron_cp.attn.hopper import backend

        if torch.cuda.is_available():
            # A fault of what the caller has done before is the caller's.
            torch.cuda.current_stream(device).synchronize()
        verdict = kept_verdict(
            _key(kind, device), lambda: run_apart(lambda: judge(backend, kind, device))
        )
        _verdicts[kind, device] = verdict
    return verdict


def tell_all(device: torch.device) -> str:
    """Returns one line on the verdicts of all kinds of calls. Raises SystemExit with such a line if any failed."""
    verdicts = {kind: find_verdict(kind, device) for kind in all_kinds()}
    wrong = [
        f"{kind.dtype}, head_dim {kind.head_dim}: {v}"
        for kind, v in verdicts.items()
        if v and not v.passed
    ]
    if wrong:
        raise SystemExit(
            f"{len(wrong)} of {len(verdicts)} kinds of kernels are wrong: {'; '.join(wrong)}"
        )
    return f"all {len(verdicts)} kinds of kernels agree with float64 on this GPU"


def all_kinds() -> list[Kind]:
    """Returns every kind of call that has kernels for both passes."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    return [
        Kind(dtypes[name], head_dim, value_dim, feature, needs_grad=True)
        for name, head_dim, value_dim, feature in forward_variants()
    ]


def kernels_of(kind: Kind) -> tuple[str, ...]:
    """Returns the names of all kernels that such calls launch."""
    asked = (kind.dtype, kind.head_dim, kind.value_dim, kind.feature)
    variants, joining = [find_variant("forward", *asked)], [MERGE]
    if kind.needs_grad:
        both = [find_gradient_kernels(*asked, deterministic) for deterministic in (False, True)]
        variants += [one for pair in both for one in pair if one is not None]
        if any(pair.dq is None for pair in both):
            variants.append(
                find_variant("backward_postprocess", kind.dtype, kind.head_dim, None, None)
            )
        variants.append(find_variant("backward_preprocess", kind.dtype, None, kind.value_dim, None))
        joining.append(ADD)
    return *dict.fromkeys(variant.name for variant in variants), *joining


def _key(kind: Kind, device: torch.device) -> str:
    """Returns a name for GPU, driver and the very machine code: any other gets a test of its own."""
    properties = torch.cuda.get_device_properties(device)
    names = kernels_of(kind)
    code = hashlib.sha256(b"".join(build.cubin(name) for name in names)).hexdigest()
    gpu = f"{properties.name} {getattr(properties, 'uuid', '')}"
    text = f"test {TEST_VERSION} {gpu} driver {driver().version} {kind} {code}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
