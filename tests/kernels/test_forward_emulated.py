"""The forward kernel's own source, run by the emulator, against float64; every asynchrony seed alike."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from megatron_cp.attn.emulated import backend
from megatron_cp.attn.emulated.backend import Settings, run_forward, running
from megatron_cp.attn.hopper import launch
from megatron_cp.attn.hopper.checks import forward_variants
from megatron_cp.attn.options import AttendOptions
from tests.attn.formula import random_case
from tests.closeness import assert_within_budget
from tests.kernels.features import of_oracle, with_feature
from tests.kernels.masks import MIXED, dense_mask
from tests.oracles.attention import dense_attention
from tests.strategies import disjoint_slices

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LSE_TOLERANCE = 1e-5


def _check(out, lse, inputs, allowed, **arguments):
    """Passes if `out` is within twice the plain formula's error, and `lse` within 1e-5."""
    __tracebackhide__ = True
    as_double = {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    exact_out, exact_lse = dense_attention(*(x.double() for x in inputs), allowed, **as_double)
    sink = arguments.pop("sink", None)
    plain_out, _ = dense_attention(
        *inputs, allowed, sink=None if sink is None else sink.to(inputs[0].dtype), **arguments
    )
    assert_within_budget(out, plain_out, exact_out, "out")
    has_keys = torch.isfinite(exact_lse)
    assert torch.equal(torch.isfinite(lse), has_keys)
    assert (lse[~has_keys] == -torch.inf).all()
    assert ((lse - exact_lse)[has_keys].abs() <= LSE_TOLERANCE).all()
    assert (out[~has_keys] == 0).all()


def _run(inputs, mask, *, feature="", out_dtype=torch.float32, seed=1, num_blocks=3, **arguments):
    out = torch.empty(*inputs[0].shape[:2], inputs[2].shape[2], dtype=out_dtype)
    lse = torch.empty(inputs[0].shape[:2])
    options = AttendOptions(inputs[0].shape[-1] ** -0.5, 0.0, "emulated")
    options = with_feature(options, feature, *inputs[:2])
    with running(Settings(seed=seed, num_blocks=num_blocks, host_threads=1)):
        run_forward(*inputs, mask, options, into=(out, lse), **arguments)
    return out, lse


@pytest.mark.parametrize("variant", forward_variants(), ids=lambda key: "-".join(map(str, key)))
def test_every_variant_computes_all_kinds_of_slices_in_one_call(variant):
    dtype, head_dim, value_dim, feature = variant
    inputs, _ = random_case(300, 300, (2, 1), (head_dim, value_dim), DTYPES[dtype])
    mask = masks.from_slices(300, 300, MIXED)
    out, lse = _run(inputs, mask, feature=feature)
    _check(out, lse, inputs, dense_mask(300, 300, MIXED), **of_oracle(feature, *inputs[:2]))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("kind", ["causal", "full", "inverse"])
def test_lengths_around_the_tiles(length, kind):
    band = {"causal": (None, 0), "full": (None, None), "inverse": (0, None)}[kind]
    slices = ((0, length, 0, length, *band),)
    inputs, _ = random_case(length, length, (1, 1), (64, 64), torch.bfloat16, seed=length)
    out, lse = _run(inputs, masks.from_slices(length, length, slices), seed=length)
    _check(out, lse, inputs, dense_mask(length, length, slices))


@st.composite
def _random_cases(draw):
    num_queries, num_keys = draw(st.integers(1, 290)), draw(st.integers(1, 290))
    return num_queries, num_keys, draw(disjoint_slices(num_queries, num_keys))


@settings(max_examples=25)
@given(
    case=_random_cases(),
    heads=st.sampled_from(((1, 1), (4, 2), (3, 1))),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
    head_dim=st.sampled_from((64, 128)),
    feature=st.sampled_from(("", "dropout")),
    seed=st.integers(0, 1000),
)
def test_random_slices_under_random_asynchrony(case, heads, dtype, head_dim, feature, seed):
    num_queries, num_keys, slices = case
    inputs, _ = random_case(num_queries, num_keys, heads, (head_dim, head_dim), dtype, seed=seed)
    mask = masks.from_slices(num_queries, num_keys, slices)
    out, lse = _run(inputs, mask, feature=feature, seed=seed)
    allowed = dense_mask(num_queries, num_keys, slices)
    _check(out, lse, inputs, allowed, **of_oracle(feature, *inputs[:2]))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_seed_and_grid_gives_the_same_bits(dtype):
    inputs, _ = random_case(300, 300, (2, 2), (128, 128), dtype)
    mask = masks.from_slices(300, 300, MIXED)
    first_out, first_lse = _run(inputs, mask, seed=0, num_blocks=1)
    for seed, num_blocks in ((1, 1), (2, 5), (3, 2), (4, 1), (5, 3), (6, 5)):
        out, lse = _run(inputs, mask, seed=seed, num_blocks=num_blocks)
        assert torch.equal(out, first_out), f"seed {seed}, {num_blocks} blocks"
        assert torch.equal(lse, first_lse), f"seed {seed}, {num_blocks} blocks"


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_attend_agrees_with_the_cpu_backend_in_every_feature(dtype, softcap):
    inputs, arguments = random_case(300, 300, (6, 2), (64, 64), dtype, sink=True)
    mask, sink = masks.from_slices(300, 300, MIXED), arguments["sink"]
    wishes = {"softcap": softcap, "sink": sink, "softmax_scale": 0.21}
    out, lse = attend(*inputs, mask, backend="emulated", deterministic=True, **wishes)
    cpu_out, cpu_lse = attend(*inputs, mask, backend="cpu", **wishes)
    assert out.dtype == dtype and lse.dtype == torch.float32
    allowed = dense_mask(300, 300, MIXED)
    exact_out, exact_lse = dense_attention(
        *(x.double() for x in inputs), allowed, **{**wishes, "sink": sink.double()}
    )
    plain_out, _ = dense_attention(*inputs, allowed, **wishes)
    assert_within_budget(out, plain_out, exact_out, "out")
    assert_within_budget(out, cpu_out, exact_out, "out against the cpu backend")
    assert ((lse - exact_lse).abs() <= LSE_TOLERANCE).all()
    assert ((lse - cpu_lse).abs() <= LSE_TOLERANCE).all()


def test_two_parts_of_the_keys_merge_into_the_whole():
    inputs, _ = random_case(200, 300, (2, 1), (64, 64), torch.bfloat16)
    q, k, v = inputs
    mask = masks.from_slices(
        200, 300, [(0, 150, 0, 300, None, 90), (170, 200, 60, 220, None, None)]
    )
    out, lse = _run((q, k[:130], v[:130]), mask.crop(k=(0, 130)))
    run_forward(
        *(q, k[130:], v[130:], mask.crop(k=(130, 300)), AttendOptions(64**-0.5, 0.0, "emulated")),
        into=(out, lse),
        earlier_QNH=out,
    )
    _check(out, lse, inputs, torch.as_tensor(mask.to_dense()))


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (256, 256)], ids=str)
def test_an_earlier_result_keeps_its_bits_where_nothing_is_added(dims, rounds):
    inputs, _ = random_case(230, 180, (2, 1), dims, torch.bfloat16)
    q, k, v = inputs
    slices = ((20, 200, 0, 100, None, None), (60, 120, 100, 180, None, 70))
    mask = masks.from_slices(230, 180, slices)
    earlier, lse = _run((q, k[:100], v[:100]), mask.crop(k=(0, 100)))
    earlier[:20] = (
        torch.nan
    )  # of rows without keys so far, in tiles with some, it may hold anything
    out = earlier.bfloat16() if rounds else earlier
    before = out.clone(), lse.clone()
    options = AttendOptions(dims[0] ** -0.5, 0.0, "emulated")
    into, rest = (out, lse), mask.crop(k=(100, 180))
    run_forward(q, k[100:], v[100:], rest, options, into=into, earlier_QNH=earlier)
    gets_more = torch.as_tensor(rest.to_dense()).any(dim=1)
    had_keys = torch.isfinite(before[1][:, 0])
    for now, then in zip(into, before, strict=True):
        assert torch.equal(now[had_keys & ~gets_more], then[had_keys & ~gets_more])
    _check(out, lse, inputs, dense_mask(230, 180, slices))


@pytest.mark.parametrize("feature", ["", "softcap", "dropout"])
@pytest.mark.parametrize("has_sink", [False, True])
def test_the_last_part_reads_what_is_held_adds_the_sink_and_rounds(feature, has_sink):
    """Rows of both parts, of one of them and of none, and whole tiles of these."""
    inputs, arguments = random_case(520, 180, (4, 2), (128, 128), torch.bfloat16, sink=has_sink)
    q, k, v = inputs
    slices = ((0, 160, 0, 100, None, None), (140, 150, 100, 180, None, None))
    slices = (*slices, (300, 380, 100, 180, None, -210))
    mask = masks.from_slices(520, 180, slices)
    sink = arguments.get("sink")
    options = AttendOptions(128**-0.5, 0.0, "emulated")
    first, last = (
        (
            k[a:b],
            v[a:b],
            mask.crop(k=(a, b)),
            with_feature(options, feature, q, k, keys=slice(a, b)),
        )
        for a, b in ((0, 100), (100, 180))
    )
    out, lse = backend.forward_last(backend.forward(q, *first), q, *last, sink)
    assert out.dtype == torch.bfloat16
    wanted = of_oracle(feature, q, k) | ({"sink": sink} if has_sink else {})
    _check(out, lse, inputs, dense_mask(520, 180, slices), **wanted)
    if not has_sink:
        held = backend.forward(q, *first)
        backend.forward_onto_(*held, q, *last)
        assert torch.equal(held[0].bfloat16(), out) and torch.equal(held[1], lse)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
def test_a_tile_without_keys_between_others_leaves_their_queries_alone(dims):
    """Tiles without keys are the last of a section of heads: with one head a section, the next head's come after."""
    inputs, _ = random_case(256, 64, (3, 3), dims, torch.bfloat16)
    mask = masks.from_slices(256, 64, [(128, 256, 0, 64, None, None)])
    for seed in range(3):
        with launch.head_by_head():
            out, lse = _run(inputs, mask, seed=seed, num_blocks=1)
        _check(out, lse, inputs, torch.as_tensor(mask.to_dense()))


@pytest.mark.parametrize("feature", ["", "softcap", "dropout"])
def test_rows_outside_every_slice_may_hold_nan(feature):
    slices = ((10, 90, 20, 147, None, None), (100, 160, 150, 180, None, 40))
    inputs, _ = random_case(170, 190, (2, 2), (64, 64), torch.bfloat16)
    q, k, v = (x.clone() for x in inputs)
    q[:10] = q[90:100] = q[160:] = torch.nan
    for x in (k, v):
        x[:20] = x[147:150] = x[180:] = torch.nan
    out, lse = _run((q, k, v), masks.from_slices(170, 190, slices), feature=feature)
    of_rows = of_oracle(feature, q, k)
    _check(out, lse, inputs, dense_mask(170, 190, slices), **of_rows)


@pytest.mark.parametrize("size", [5.0, 1e3])
def test_scores_far_beyond_the_cap_are_the_cap(size):
    (q, k, v), _ = random_case(150, 300, (2, 1), (64, 64), torch.bfloat16)
    inputs = (q * size, k * size, v)  # e^2y from 0 to far beyond the largest float
    out, lse = _run(inputs, masks.full(150, 300), feature="softcap")
    every = torch.ones(150, 300, dtype=torch.bool)
    _check(out, lse, inputs, every, **of_oracle("softcap", q, k))


def test_strided_inputs_are_read_where_they_lie():
    inputs, _ = random_case(150, 150, (2, 2), (64, 64), torch.float16)
    packed = torch.full((150, 4, 3 * 64), torch.nan, dtype=torch.float16)
    views = [packed[:, :2, 64 * i : 64 * (i + 1)] for i in range(3)]
    for view, x in zip(views, inputs, strict=True):
        view.copy_(x)
    mask = masks.causal(150)
    assert torch.equal(_run(views, mask)[0], _run(inputs, mask)[0])
    # Rows that begin between 16-byte steps are copied first.
    odd = torch.full((150, 2, 65), torch.nan, dtype=torch.float16)[..., 1:]
    odd.copy_(inputs[0])
    assert torch.equal(_run((odd, *views[1:]), mask)[0], _run(inputs, mask)[0])


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_nothing_but_the_result_is_written(out_dtype):
    inputs, _ = random_case(140, 300, (2, 1), (64, 64), torch.bfloat16)
    mask = masks.from_slices(140, 300, [(0, 129, 0, 300, None, None)])
    around = torch.full((142, 4, 80), 7.0, dtype=out_dtype)
    lse_around = torch.full((142, 4), 7.0)
    out, lse = around[1:141, 1:3, 8:72], lse_around[1:141, 1:3]
    options = AttendOptions(64**-0.5, 0.0, "emulated")
    run_forward(*inputs, mask, options, into=(out, lse))
    _check(out, lse, inputs, torch.as_tensor(mask.to_dense()))
    out.fill_(7.0)
    lse.fill_(7.0)
    assert (around == 7.0).all() and (lse_around == 7.0).all()


def test_calls_without_queries_keys_or_slices():
    for num_queries, num_keys in ((0, 5), (5, 0), (5, 5)):
        inputs, _ = random_case(num_queries, num_keys, (2, 1), (64, 64), torch.bfloat16)
        empty = masks.from_slices(num_queries, num_keys, [])
        out, lse = attend(*inputs, empty, backend="emulated")
        assert out.shape == (num_queries, 2, 64) and (out == 0).all()
        assert lse.shape == (num_queries, 2) and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"dtype": torch.float32},
            r"dtype=torch.float32, only torch.bfloat16 and torch.float16.*'cpu'",
        ),
        ({"head_dim": 264}, r"head_dim=264, value head_dim=264, only for \(64, 64\).*'cpu'"),
        ({"scale": -1.0}, "softmax_scale=-1.0 < 0; negate q"),
    ],
)
def test_wishes_that_the_kernels_do_not_serve_name_backends_that_do(change, message):
    head_dim, dtype = change.get("head_dim", 64), change.get("dtype", torch.bfloat16)
    inputs, _ = random_case(8, 8, (1, 1), (head_dim, head_dim), dtype)
    with pytest.raises(NotImplementedError, match=rf"backend='emulated'.*{message}|{message}"):
        attend(*inputs, masks.causal(8), backend="emulated", softmax_scale=change.get("scale"))
