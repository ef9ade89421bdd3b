"""Which library serves which call, what each is given, and what is refused by name."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend, resolve_options
from megatron_cp.attn.flash import checks, libraries, operators, trial
from megatron_cp.attn.flash.operators import Wish
from tests.attn.flash_libraries import flash2, flash3, flash4, loaded_anew
from tests.attn.flash_on_host import on_host
from tests.attn.formula import assert_attention, random_case

__all__ = ["flash2", "flash3", "flash4", "loaded_anew"]
pytestmark = pytest.mark.usefixtures("loaded_anew")
PLAIN = Wish((8, 0), 128, 128, False, False, True, False)


def find_operator(wish):
    """The first operator that serves a wish, and the reasons, where each of them is right."""
    return libraries.find_operator(wish, lambda operator: None)


def test_without_flash_attn_torch_serves_and_the_reason_is_kept():
    operator, reasons = find_operator(PLAIN)
    assert operator.name == "torch"
    assert reasons == (
        "flash-attn 4 is used on compute capability 10.0 and 10.3",
        "flash-attn 3 needs compute capability 9.0",
        "flash-attn 2 is not installed",
    )


def test_a_library_that_cannot_serve_is_not_imported(monkeypatch):
    asked = []

    def import_module(name):
        asked.append(name)
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(libraries.importlib, "import_module", import_module)
    find_operator(PLAIN)
    find_operator(PLAIN._replace(capability=(9, 0)))
    assert asked == ["flash_attn.flash_attn_interface", "flash_attn_3._C"]


REFUSED = {
    "an older GPU": (
        PLAIN._replace(capability=(7, 5)),
        "torch's operator needs compute capability 8.0",
    ),
    "softcap": (PLAIN._replace(has_softcap=True), "torch's operator has no softcap"),
    "determinism": (
        PLAIN._replace(deterministic=True),
        "torch's operator is deterministic under torch.use_deterministic_algorithms",
    ),
    "another value head dim": (PLAIN._replace(head_dim=192), "has one head dim for q, k and v"),
    "an odd head dim": (
        PLAIN._replace(head_dim=100, value_dim=100),
        "has head dims that are multiples of 8 up to 256",
    ),
    "a large head dim": (
        PLAIN._replace(head_dim=264, value_dim=264),
        "has head dims that are multiples of 8 up to 256",
    ),
    "training head dim 224 on a small GPU": (
        PLAIN._replace(head_dim=224, value_dim=224, capability=(8, 9)),
        "trains head dims of 193 to 224 on compute capability 8.0 and 9.0 only",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_cannot_do_is_named(case):
    wish, reason = REFUSED[case]
    operator, reasons = find_operator(wish)
    assert operator is None
    assert reason in reasons[-1]


def test_what_torch_can_do_beside_is_served():
    for wish in (
        PLAIN._replace(deterministic=True, needs_grad=False),
        PLAIN._replace(deterministic=True, torch_is_deterministic=True),
        PLAIN._replace(head_dim=224, value_dim=224, needs_grad=False, capability=(8, 9)),
        PLAIN._replace(head_dim=256, value_dim=256, capability=(12, 0)),
        PLAIN._replace(head_dim=40, value_dim=40),
    ):
        assert find_operator(wish)[0].name == "torch"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"softcap": 2.0},
            r"no operator for head_dim=16.*softcap=2.0.*has no softcap; install flash-attn, or use",
        ),
        (
            {"deterministic": True},
            r"deterministic=True, gradients=True: .*; call torch.use_deterministic_algorithms\(True\)",
        ),
        ({"softmax_scale": -1.0}, r"softmax_scale=-1.0, only numbers > 0; negate q"),
        ({"softmax_scale": 0.0}, r"softmax_scale=0.0, only numbers > 0"),
    ],
)
def test_a_call_that_nothing_serves_is_refused_before_it_starts(options, message):
    (q, k, v), _ = random_case(8, 8, (2, 2), (16, 16), torch.bfloat16)
    q.requires_grad_()
    with on_host() as calls, pytest.raises(NotImplementedError, match=message):
        attend(q, k, v, masks.causal(8), backend="flash", **options)
    assert not calls


def test_devices_and_dtypes_are_refused_with_what_can():
    (q, k, v), _ = random_case(8, 8, (2, 2), (16, 16), torch.bfloat16)
    with pytest.raises(
        NotImplementedError, match=r"device=cpu, only on CUDA .*'cpu' or 'reference'"
    ):
        resolve_options(q, k, v, backend="flash")
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32, shape=(8, 2, 16))
    with pytest.raises(NotImplementedError, match=r"dtype=torch.float32, only torch.bfloat16 and"):
        checks.check_supported(on_gpu, on_gpu, 1.0, 0.0, False, False)


def test_a_torch_whose_operator_has_no_windows_is_refused(monkeypatch):
    old = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # some operator without them
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", old)
    assert "has no window_size_left in its operator" in operators.torch_operator()


LIBRARY_MASKS = {
    "documents": masks.documents([9, 1, 14], "causal"),
    "window": masks.documents([9, 1, 14], ("window", 4)),
    "more queries than keys": masks.from_slices(24, 24, [(0, 24, 4, 12, -13, 1)]),
    "question and answers": masks.shared_question([10, 8, 6]),
}


@pytest.mark.parametrize("library", ["flash2", "flash3", "flash4"])
@pytest.mark.parametrize("name", LIBRARY_MASKS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_each_library_gets_what_it_calls_things(library, name, softcap, request):
    label, capability = request.getfixturevalue(library)
    if softcap and library == "flash4":
        softcap = 0.0  # refused: test_what_libraries_cannot_do_is_named
    mask = LIBRARY_MASKS[name]
    inputs, arguments = random_case(24, 24, (4, 2), (16, 16), torch.float64)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with on_host(capability, trial.find_fault) as torch_calls:
        out, lse = attend(
            *leaves, mask, backend="flash", softcap=softcap, deterministic=library != "flash4"
        )
        finite = lse.masked_fill(~torch.isfinite(lse), 0.0)
        loss = (out * arguments["dout"]).sum() + (finite * arguments["dlse"]).sum()
        gradients = torch.autograd.grad(loss, leaves)
        assert {operator.name for operator, _ in checks._found.values()} == {label}
    assert not torch_calls
    actual = (out.detach(), lse.detach(), *gradients)
    dense = torch.as_tensor(mask.to_dense())
    assert_attention(actual, inputs, dense, plain_dtype=torch.float64, softcap=softcap, **arguments)


def test_what_libraries_cannot_do_is_named(flash2, flash3, flash4):
    found = {
        "flash-attn 3 needs compute capability 9.0": PLAIN._replace(capability=(7, 0)),
        "flash-attn 3 has head dims": PLAIN._replace(capability=(9, 0), head_dim=96),
        "flash-attn 3 is deterministic up to head dim 192": PLAIN._replace(
            capability=(9, 0), head_dim=256, value_dim=256, deterministic=True
        ),
        "flash-attn 4 is used without softcap": PLAIN._replace(
            capability=(10, 0), has_softcap=True
        ),
    }
    for reason, wish in found.items():
        _, reasons = find_operator(wish)
        assert any(reason in given for given in reasons), (reason, reasons)


def test_latent_attention_is_served_by_flash_attn_3(flash3):
    wish = PLAIN._replace(capability=(9, 0), head_dim=192)
    assert find_operator(wish)[0].name == "flash-attn 3"


def test_a_library_without_a_name_that_we_pass_is_not_used(monkeypatch, flash4):
    interface = sys.modules["flash_attn.cute.interface"]
    monkeypatch.setattr(interface, "_flash_attn_bwd", lambda q, k, v, out, dout, lse: None)
    _, reasons = find_operator(PLAIN._replace(capability=(10, 0)))
    assert reasons[0] == "the installed flash-attn 4 has no cu_seqlens_q; install a newer one"


def test_a_library_that_does_not_load_is_named(monkeypatch):
    def broken(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(libraries.importlib, "import_module", broken)
    _, reasons = find_operator(PLAIN)
    assert reasons[2] == "the installed flash-attn 2 does not load (undefined symbol)"
