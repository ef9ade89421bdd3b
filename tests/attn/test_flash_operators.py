"""Which library serves which call, what each is given, and what is refused by name."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend, resolve_options
from megatron_cp.attn.flash import checks, libraries, operators
from megatron_cp.attn.flash.operators import Wish
from tests.attn import flash_on_host
from tests.attn.flash_on_host import on_host
from tests.attn.formula import assert_attention, random_case

PLAIN = Wish((8, 0), 128, 128, False, False, True, False)


@pytest.fixture(autouse=True)
def _loaded_anew(monkeypatch):
    for load in (libraries._flash2, libraries._flash3, libraries._flash4, operators.torch_operator):
        load.cache_clear()
    for name in ("flash_attn", "flash_attn_3"):  # whatever is installed here
        monkeypatch.setitem(sys.modules, name, None)
    yield
    for load in (libraries._flash2, libraries._flash3, libraries._flash4, operators.torch_operator):
        load.cache_clear()


def test_without_flash_attn_torch_serves_and_the_reason_is_kept():
    operator, reasons = libraries.find_operator(PLAIN)
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
    libraries.find_operator(PLAIN)
    libraries.find_operator(PLAIN._replace(capability=(9, 0)))
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
    operator, reasons = libraries.find_operator(wish)
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
        assert libraries.find_operator(wish)[0].name == "torch"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"softcap": 2.0},
            r"no operator for head_dim=16.*softcap=2.0.*has no softcap; install flash-attn, or use",
        ),
        (
            {"deterministic": True},
            r"deterministic=True, gradients=True: .*use backend='flex' or 'reference'",
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


# ---------------------------------------------------------------------- flash-attn, as published

# Parameters by their published names, in their order; `*` begins those with defaults.
FLASH2_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
FLASH2_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, "
    "Tensor(c!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) "
    "-> Tensor"
)
FLASH3_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, "
    "float softcap=0.0, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
FLASH3_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None, "
    "Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _window(o):
    left, right = o["window_size_left"], o["window_size_right"]
    causal = o.get("causal", o.get("is_causal"))
    assert causal == (left in (-1, None) and right == 0)
    return tuple(None if side in (-1, None) else side for side in (left, right))


def _run_forward(q, k, v, **o):
    cu = (o["cu_seqlens_q"], o["cu_seqlens_k"])
    return flash_on_host.varlen_forward(
        q, k, v, *cu, _window(o), o["softmax_scale"], o.get("softcap") or 0.0
    )


def _run_backward(dout, q, k, v, out, lse, o):
    cu = (o["cu_seqlens_q"], o["cu_seqlens_k"])
    parts = flash_on_host.varlen_backward(
        *(dout, q, k, v, out, lse, *cu),
        *(_window(o), o["softmax_scale"], o.get("softcap") or 0.0),
    )
    for name, part in zip(("dq", "dk", "dv"), parts, strict=True):
        o[name].copy_(part)


def _named(schema, arguments, keywords):
    """Returns all arguments by name, as the dispatcher leaves them: some by place, defaults left out."""
    names = [
        part.split("=")[0].split()[-1] for part in schema[1 : schema.rindex(") ->")].split(", ")
    ]
    return {**dict(zip(names, arguments, strict=False)), **keywords}


@pytest.fixture
def flash2(monkeypatch):
    """flash-attn 2.8 as far as we see it: registered operators, here float64 formulas."""
    library = torch.library.Library("flash_attn", "DEF")
    library.define("_flash_attn_varlen_forward" + FLASH2_FORWARD)
    library.define("_flash_attn_varlen_backward" + FLASH2_BACKWARD)

    def forward(*arguments, **keywords):
        o = _named(FLASH2_FORWARD, arguments, keywords)
        out, lse = _run_forward(o.pop("q"), o.pop("k"), o.pop("v"), **o)
        return out, lse, out.new_zeros(0), out.new_zeros(0)

    def backward(*arguments, **keywords):
        o = _named(FLASH2_BACKWARD, arguments, keywords)
        _run_backward(o["dout"], o["q"], o["k"], o["v"], o["out"], o["softmax_lse"], o)
        return o["dq"].new_zeros(0)

    library.impl("_flash_attn_varlen_forward", forward, "CPU")
    library.impl("_flash_attn_varlen_backward", backward, "CPU")
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    yield "flash-attn 2", (8, 0)
    library._destroy()


@pytest.fixture
def flash3(monkeypatch):
    """flash-attn 3 as far as we see it."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define("fwd" + FLASH3_FORWARD)
    library.define("bwd" + FLASH3_BACKWARD)

    def forward(*arguments, **keywords):
        o = _named(FLASH3_FORWARD, arguments, keywords)
        assert o["num_splits"] == 1
        out, lse = _run_forward(o.pop("q"), o.pop("k"), o.pop("v"), **o)
        return out, lse, out.new_zeros(0), out.new_zeros(0)

    def backward(*arguments, **keywords):
        o = _named(FLASH3_BACKWARD, arguments, keywords)
        _run_backward(o["dout"], o["q"], o["k"], o["v"], o["out"], o["softmax_lse"], o)
        return tuple(o["dq"].new_zeros(0) for _ in range(5))

    library.impl("fwd", forward, "CPU")
    library.impl("bwd", backward, "CPU")
    for name in ("flash_attn_3", "flash_attn_3._C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    yield "flash-attn 3", (9, 0)
    library._destroy()


@pytest.fixture
def flash4(monkeypatch):
    """flash-attn 4 as far as we see it: plain functions, None for an open side."""

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None,
        return_lse=False,
    ):  # fmt: skip
        assert return_lse
        o = dict(locals())
        return (*_run_forward(o.pop("q"), o.pop("k"), o.pop("v"), **o), None, None)

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        _run_backward(dout, q, k, v, out, lse, dict(locals()))
        return dq, dk, dv

    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return "flash-attn 4", (10, 0)


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
    with on_host(capability) as torch_calls:
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
        _, reasons = libraries.find_operator(wish)
        assert any(reason in given for given in reasons), (reason, reasons)


def test_latent_attention_is_served_by_flash_attn_3(flash3):
    wish = PLAIN._replace(capability=(9, 0), head_dim=192)
    assert libraries.find_operator(wish)[0].name == "flash-attn 3"


def test_a_library_without_a_name_that_we_pass_is_not_used(monkeypatch, flash4):
    interface = sys.modules["flash_attn.cute.interface"]
    monkeypatch.setattr(interface, "_flash_attn_bwd", lambda q, k, v, out, dout, lse: None)
    _, reasons = libraries.find_operator(PLAIN._replace(capability=(10, 0)))
    assert reasons[0] == "the installed flash-attn 4 has no cu_seqlens_q; install a newer one"


def test_a_library_that_does_not_load_is_named(monkeypatch):
    def broken(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(libraries.importlib, "import_module", broken)
    _, reasons = libraries.find_operator(PLAIN)
    assert reasons[2] == "the installed flash-attn 2 does not load (undefined symbol)"
