"""The Hopper launch without a GPU: a host 'device' follows the parameter block; refusals; caches.

Everything but the kernel itself is the product's own path: options, work lists, tensor maps, parameters.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.attn import attend, device_lists, hopper, hopper_checks, resolve_options
from megatron_cp.attn.options import AttendOptions
from megatron_cp.kernels import build
from tests.closeness import assert_within_budget
from tests.kernels.host_device import HostDevice
from tests.oracles.attention import dense_attention
from tests.strategies import attention_masks


@contextmanager
def host_device() -> Iterator[HostDevice]:
    """CPU tensors pass for tensors of an H100 whose driver is a HostDevice; nothing is compiled."""
    host = HostDevice(128, 128)
    on_gpu = torch.device("cuda", 0)
    check_wish = hopper_checks.check_wish

    def check_as_if_on_gpu(q, v, *rest):
        check_wish(SimpleNamespace(shape=q.shape, dtype=q.dtype, device=on_gpu), v, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_checks, "check_wish", check_as_if_on_gpu)
        patch.setattr(hopper_checks, "_capability", lambda _: (9, 0))
        patch.setattr(hopper, "driver", lambda: host)
        patch.setattr(build, "cubin", lambda name: name.encode())
        patch.setattr(hopper, "_current_device", lambda: 0)
        patch.setattr(hopper, "_num_sms", lambda _: 132)
        patch.setattr(hopper, "_raw_stream", lambda _: 7)
        zeros = torch.zeros(hopper.MAX_STREAMS * hopper.COUNTER_BYTES // 4, dtype=torch.int32)
        patch.setattr(hopper, "_zeroed_counters", lambda _: zeros)
        _forget()
        try:
            yield host
        finally:
            _forget()


def _forget():
    hopper._kernel.cache_clear()
    hopper._tensor_maps.clear()
    hopper._counter_pools.clear()
    hopper._counter_of_stream.clear()
    device_lists._entries.clear()


@pytest.fixture(scope="module", autouse=True)
def operator_on_cpu():
    """The operator's CUDA implementation, registered for CPU tensors too."""
    library = torch.library.Library("megatron_cp", "IMPL")
    library.impl("attention_forward", hopper._forward, "CPU")
    yield
    library._destroy()


@pytest.fixture
def device():
    with host_device() as host:
        yield host


def _draw(num_queries, num_keys, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    q, k = (num_queries, heads[0], dims[0]), (num_keys, heads[1], dims[0])
    shapes = (q, k, (num_keys, heads[1], dims[1]))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _assert_attention(result, tensors, dense, **options):
    """Compares `(out, lse)` with float64; a result in 16 bits may be rounded once."""
    out, lse = result
    sink = options.pop("sink", None)
    exact, plain = (
        dense_attention(
            *(x.to(dtype) for x in tensors),
            dense,
            **options,
            **({} if sink is None else {"sink": sink.to(dtype)}),
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_within_budget(out, plain[0].to(out.dtype), exact[0], "out")
    assert_within_budget(lse, plain[1], exact[1], "lse")


# ---------------------------------------------------------------------- what a launch says


@settings(max_examples=30)
@given(
    attention_masks(),
    st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_launch_carries_mask_heads_scale_softcap_and_sink(case, heads, softcap, has_sink, dtype):
    mask, dense = case
    tensors = _draw(mask.num_queries, mask.num_keys, heads, dtype=dtype)
    options = {"softmax_scale": 0.3, "softcap": softcap}
    if has_sink:
        options["sink"] = torch.linspace(-1, 1, heads[0])
    with host_device():
        out, lse = attend(*tensors, mask, backend="hopper", **options)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    _assert_attention((out, lse), tensors, dense, **options)


def test_raw_pass_gives_float32_and_no_sink(device):
    mask = masks.documents([5, 1, 7])
    tensors = _draw(13, 13)
    out, lse = hopper.forward(*tensors, mask, AttendOptions(0.25, backend="hopper"))
    assert out.dtype == torch.float32
    _assert_attention((out, lse), tensors, mask.to_dense(), softmax_scale=0.25)


def test_parts_merge_onto_each_other_in_place(device):
    mask = masks.sliding_window(20, 6)
    q, k, v = _draw(20, 20)
    options = AttendOptions(0.25, backend="hopper")
    parts = [mask.crop(k=span) for span in ((0, 9), (9, 20))]
    out, lse = hopper.forward(q, k[:9], v[:9], parts[0], options)
    hopper.forward_onto_(out, lse, q, k[9:], v[9:], parts[1], options)
    empty = masks.from_slices(20, 20, [])
    hopper.forward_onto_(out, lse, q, k, v, empty, options)
    _assert_attention((out, lse), (q, k, v), mask.to_dense(), softmax_scale=0.25)


@pytest.mark.parametrize("value_dim", [128, 192])
def test_head_dim_of_values_may_differ_where_a_kernel_serves_it(device, value_dim):
    device.block_n = 128 if value_dim == 128 else 112
    tensors = _draw(9, 9, dims=(192, value_dim))
    mask = masks.causal(9)
    result = attend(*tensors, mask, backend="hopper")
    _assert_attention(result, tensors, mask.to_dense())


def test_strided_views_are_read_where_they_lie(device):
    packed = torch.randn(11, 8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    head_major = torch.randn(4, 11, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    for query in (q, head_major.transpose(0, 1)):
        result = attend(query, k, v, masks.causal(11), backend="hopper")
        _assert_attention(result, (query, k, v), masks.causal(11).to_dense())


def test_zero_scale_means_equal_weights(device):
    tensors = _draw(6, 6)
    mask = masks.causal(6)
    result = attend(*tensors, mask, backend="hopper", softmax_scale=0.0)
    _assert_attention(result, tensors, mask.to_dense(), softmax_scale=0.0)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5, 5)])
def test_nothing_is_launched_when_no_row_has_keys(device, shape):
    tensors = _draw(*shape)
    mask = masks.from_slices(*shape, [])
    out, lse = attend(*tensors, mask, backend="hopper")
    assert out.shape == (shape[0], 4, 64) and (out == 0).all()
    assert (lse == -torch.inf).all()
    sink = torch.tensor([0.5, 1.0, -1.0, 2.0])
    out, lse = attend(*tensors, mask, backend="hopper", sink=sink)
    assert (out == 0).all() and (lse == sink).all()
    assert device.launches == []


def test_launch_has_a_block_per_multiprocessor_but_no_more_than_there_is_work(device):
    attend(*_draw(3, 3), masks.causal(3), backend="hopper")
    attend(*_draw(700, 20), masks.full(700, 20), backend="hopper")
    variant = build.variants()["fwd_bf16_64"]
    threads, shared = int(variant.value("MCP_THREADS")), int(variant.value("MCP_SHARED_BYTES"))
    assert device.launches == [(4, threads, shared, 7), (6 * 4, threads, shared, 7)]


@pytest.mark.parametrize(
    ("num_keys", "sections"), [(1 << 10, 64), (1 << 15, 16), (1 << 17, 8), (1 << 22, 8)]
)
def test_head_sections_are_those_whose_keys_fit_the_cache(num_keys, sections):
    # 8 kv heads of 64 query heads, 128 + 128 columns of 2 bytes: 2^15 keys are 16 MB per kv head.
    assert hopper._heads_per_section(64, 8, num_keys, 256) == sections


# ---------------------------------------------------------------------- caches


def test_second_call_plans_and_describes_nothing_again(device, monkeypatch):
    tensors, mask = _draw(40, 40), masks.causal(40)
    first = attend(*tensors, mask, backend="hopper")
    monkeypatch.setattr(device_lists, "forward_work", lambda *_: pytest.fail("planned again"))
    encoded = len(device.maps)
    second = attend(*tensors, mask, backend="hopper")
    assert len(device.maps) == encoded == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_same_address_with_another_shape_or_stride_gets_a_map_of_its_own(device):
    memory = torch.randn(2 * 16 * 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    views = [memory.view(16, 2, 64), memory.view(32, 1, 64), memory.view(2, 16, 64).transpose(0, 1)]
    for x in views:
        rows = x.shape[0]
        result = attend(x, x, x, masks.causal(rows), backend="hopper")
        _assert_attention(result, (x, x, x), masks.causal(rows).to_dense())


def test_equal_masks_are_planned_apart_and_a_list_goes_with_its_mask(device):
    mask, twin = masks.causal(8), masks.causal(8)
    attend(*_draw(8, 8), mask, backend="hopper")
    attend(*_draw(8, 8), twin, backend="hopper")
    assert device_lists.num_cached() == 2
    del mask
    gc.collect()
    assert device_lists.num_cached() == 1


def test_another_tile_shape_gets_a_list_of_its_own(device):
    mask, dense = masks.causal(300), masks.causal(300).to_dense()
    for dims, block_n in (((128, 128), 128), ((192, 192), 112)):
        device.block_n = block_n
        tensors = _draw(300, 300, (1, 1), dims)
        _assert_attention(attend(*tensors, mask, backend="hopper"), tensors, dense)
    assert device_lists.num_cached() == 2


def test_every_stream_has_work_counters_of_its_own(device, monkeypatch):
    addresses = [hopper._counters(0, stream) for stream in (7, 8, 7, 9)]
    assert addresses[0] == addresses[2]
    assert len(set(addresses)) == 3
    apart = np.diff(sorted(set(addresses)))
    assert (apart >= 8).all()
    for stream in range(100, 100 + hopper.MAX_STREAMS - 3):
        hopper._counters(0, stream)
    with pytest.raises(RuntimeError, match=r"stream 5 is number 257 .* at most 256 .* reuse"):
        hopper._counters(0, 5)


def test_streams_that_begin_together_share_no_counters(device):
    barrier, found = threading.Barrier(8), []

    def first_use(stream):
        barrier.wait(timeout=20)
        found.append(hopper._counters(0, stream))

    threads = [threading.Thread(target=first_use, args=(100 + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(set(found)) == 8


# ---------------------------------------------------------------------- refusals


REFUSED_WISHES = {
    "CPU tensors": (
        {},
        r"device=cpu, only on CUDA devices of compute capability 9\.0 .* use backend='cpu' or",
    ),
    "meta tensors": ({"device": "meta"}, r"device=meta, only on CUDA devices"),
}


@pytest.mark.parametrize("case", REFUSED_WISHES)
def test_tensors_elsewhere_are_refused(case):
    where, message = REFUSED_WISHES[case]
    tensors = [x.to(**where) if where else x for x in _draw(4, 4)]
    with pytest.raises(NotImplementedError, match=message):
        attend(*tensors, masks.causal(4), backend="hopper")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"dtype": torch.float32}, {}, r"dtype=torch.float32, only torch.bfloat16 and .*flex"),
        ({"dims": (80, 80)}, {}, r"head_dim=80 with a value head_dim=80, only for \(64, 64\), .*"),
        ({"dims": (64, 128)}, {}, r"head_dim=64 with a value head_dim=128, only for"),
        ({}, {"softmax_scale": -0.5}, r"softmax_scale=-0.5 < 0; negate q and the scale"),
    ],
)
def test_wishes_without_a_kernel_name_what_there_is(device, change, options, message):
    with pytest.raises(NotImplementedError, match=message):
        attend(*_draw(4, 4, **change), masks.causal(4), backend="hopper", **options)
    assert device.launches == []


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_compute_capabilities_are_refused(device, monkeypatch, capability):
    monkeypatch.setattr(hopper_checks, "_capability", lambda _: capability)
    found = f"{capability[0]}.{capability[1]}"
    with pytest.raises(
        NotImplementedError, match=rf"cuda:0 of compute capability {found}, only on 9\.0 .*'flex'"
    ):
        attend(*_draw(4, 4), masks.causal(4), backend="hopper")


@pytest.mark.parametrize("which", range(4))
def test_gradients_are_refused_at_the_call_and_not_made_by_another_backend(device, which):
    tensors, sink = _draw(4, 4), torch.zeros(4)
    (*tensors, sink)[which].requires_grad_()
    message = r"no backward pass yet.*train with backend='flex' .*torch\.no_grad\(\)"
    with pytest.raises(NotImplementedError, match=message):
        attend(*tensors, masks.causal(4), backend="hopper", sink=sink)
    assert device.launches == []
    with torch.no_grad():
        attend(*tensors, masks.causal(4), backend="hopper", sink=sink)
    with pytest.raises(NotImplementedError, match=message):
        zeros = torch.zeros(4, 4)
        options = AttendOptions(1.0, backend="hopper")
        hopper.backward(tensors[0], *tensors, zeros, zeros, masks.causal(4), options)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),  # last dimension is strided
        lambda x: torch.cat([x, x[..., :4]], dim=-1)[..., :64],  # rows begin at 8 bytes
        lambda x: torch.cat([x.flatten(), x.flatten()])[4 : 4 + x.numel()].view(x.shape),  # address
    ],
)
@pytest.mark.parametrize("which", range(3))
def test_layouts_that_the_copy_engine_cannot_read_are_refused(device, change, which):
    tensors = _draw(8, 8)
    tensors[which] = change(tensors[which])
    name = "qkv"[which]
    with pytest.raises(
        ValueError, match=rf"^{name} of strides .* multiple of 8 .*; call {name}\.contiguous\(\)"
    ):
        attend(*tensors, masks.causal(8), backend="hopper")
    assert device.launches == []
    tensors[which] = tensors[which].contiguous().clone()
    attend(*tensors, masks.causal(8), backend="hopper")


@pytest.mark.parametrize(
    "row", [(0, 9, 0, 4, -99, 99), (0, 4, 0, 9, -99, 99), (0, 4, -3, 2, -9, 9)]
)
def test_mask_whose_slices_leave_the_tensors_is_refused(device, row):
    mask = masks.AttentionMask(8, 8, np.array([row]))  # this constructor does not check
    with pytest.raises(ValueError, match=r"outside the grid 8 x 8; build masks with from_slices"):
        attend(*_draw(8, 8), mask, backend="hopper")
    assert device.launches == []


def test_first_call_inside_a_graph_capture_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must not be inside a CUDA graph capture; call it once"):
        hopper._zeroed_counters(0)


def test_hopper_is_never_chosen_by_itself():
    q, k, v = (x.to("meta") for x in _draw(4, 4))
    assert resolve_options(q, k, v).backend == "flex"


# ---------------------------------------------------------------------- the operator


@pytest.mark.parametrize("float_out", [False, True])
@pytest.mark.parametrize("sink", [None, torch.zeros(4)])
def test_operator_keeps_the_rules_of_operators(device, float_out, sink):
    q, k, v = _draw(9, 9)
    lists = hopper._work_list(q, v, masks.causal(9), 0.0)
    arguments = (q, k, v, *lists, sink, 0.125, 0.0, float_out)
    operator = torch.ops.megatron_cp.attention_forward.default
    torch.library.opcheck(operator, arguments)


def test_compiled_attention_gives_the_bits_of_the_plain_call(device):
    mask = masks.documents([4, 9])

    def layer(q, k, v):
        out, lse = attend(q * 1.0, k, v, mask, backend="hopper")
        return out * 2.0, lse

    tensors = _draw(13, 13)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        plain, made = layer(*tensors), compiled(*tensors)
        assert all(torch.equal(a, b) for a, b in zip(plain, made, strict=True))


def test_operator_in_one_graph_gives_the_bits_of_the_plain_call(device):
    q, k, v = _draw(13, 13)
    lists = hopper._work_list(q, v, masks.documents([4, 9]), 0.0)

    def layer(q, k, v, data):
        out, lse = torch.ops.megatron_cp.attention_forward(
            q, k, v, data, lists.num_tiles, lists.num_segs, None, 0.125, 0.0, False
        )
        return out * 2.0, lse

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    plain, made = layer(q, k, v, lists.data), compiled(q, k, v, lists.data)
    assert all(torch.equal(a, b) for a, b in zip(plain, made, strict=True))


def test_gradient_through_the_operator_is_refused(device):
    q, k, v = _draw(9, 9)
    lists = hopper._work_list(q, v, masks.causal(9), 0.0)
    operator = torch.ops.megatron_cp.attention_forward
    out, _ = operator(q.requires_grad_(), k, v, *lists, None, 0.125, 0.0, True)
    with pytest.raises(NotImplementedError, match="no backward pass yet"):
        out.sum().backward()
