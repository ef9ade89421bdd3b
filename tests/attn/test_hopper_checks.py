"""The Hopper launch without a GPU: a host 'device' follows the parameter block; refusals; caches.

Everything but the kernel itself is the product's own path: options, work lists, tensor maps, parameters.
"""

import gc
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import device_memory
from megatron_cp import mask as masks
from megatron_cp.attn import attend, device_arrays, resolve_options
from megatron_cp.attn.hopper import backend as hopper
from megatron_cp.attn.hopper import checks as hopper_checks
from megatron_cp.attn.hopper import device_lists, gpu
from megatron_cp.attn.hopper import launch as hopper_launch
from megatron_cp.attn.options import AttendOptions
from megatron_cp.kernels import build
from tests.attn.on_host import assert_attention, draw, host_device
from tests.processes import HANG_SECONDS
from tests.strategies import attention_masks


@pytest.fixture
def device():
    with host_device() as host:
        yield host


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
    tensors = draw(mask.num_queries, mask.num_keys, heads, dtype=dtype)
    options = {"softmax_scale": 0.3, "softcap": softcap}
    if has_sink:
        options["sink"] = torch.linspace(-1, 1, heads[0])
    with host_device():
        out, lse = attend(*tensors, mask, backend="hopper", **options)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert_attention((out, lse), tensors, dense, **options)


def test_raw_pass_gives_float32_and_no_sink(device):
    mask = masks.documents([5, 1, 7])
    tensors = draw(13, 13)
    out, lse = hopper.forward(*tensors, mask, AttendOptions(0.25, backend="hopper"))
    assert out.dtype == torch.float32
    assert_attention((out, lse), tensors, mask.to_dense(), softmax_scale=0.25)


def test_parts_merge_onto_each_other_in_place(device):
    mask = masks.sliding_window(20, 6)
    q, k, v = draw(20, 20)
    options = AttendOptions(0.25, backend="hopper")
    parts = [mask.crop(k=span) for span in ((0, 9), (9, 20))]
    out, lse = hopper.forward(q, k[:9], v[:9], parts[0], options)
    hopper.forward_onto_(out, lse, q, k[9:], v[9:], parts[1], options)
    empty = masks.from_slices(20, 20, [])
    hopper.forward_onto_(out, lse, q, k, v, empty, options)
    assert_attention((out, lse), (q, k, v), mask.to_dense(), softmax_scale=0.25)


def test_tiles_without_keys_are_left_out_where_parts_merge(device):
    """The stand-in of the kernel refuses them."""
    mask = masks.documents([150, 150])
    q, k, v = draw(300, 300)
    options = AttendOptions(0.25, backend="hopper")
    out, lse = hopper.forward(q, k[:150], v[:150], mask.crop(k=(0, 150)), options)
    hopper.forward_onto_(out, lse, q, k[150:], v[150:], mask.crop(k=(150, 300)), options)
    assert_attention((out, lse), (q, k, v), mask.to_dense(), softmax_scale=0.25)


@pytest.mark.parametrize("held_keys", [0, 150, 300])
def test_the_last_part_adds_the_sink_and_rounds(device, held_keys):
    mask, sink = masks.documents([150, 150]), torch.linspace(-1, 1, 4)
    q, k, v = draw(300, 300)
    first, last = (mask.crop(k=span) for span in ((0, held_keys), (held_keys, 300)))
    options = AttendOptions(0.25, backend="hopper")
    held = hopper.forward(q, k[:held_keys], v[:held_keys], first, options) if held_keys else None
    rest = k[held_keys:], v[held_keys:], last
    out, lse = hopper.forward_last(held, q, *rest, options, sink)
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)
    assert_attention((out, lse), (q, k, v), mask.to_dense(), softmax_scale=0.25, sink=sink)


@pytest.mark.parametrize("value_dim", [128, 192])
def test_head_dim_of_values_may_differ_where_a_kernel_serves_it(device, value_dim):
    tensors = draw(9, 9, dims=(192, value_dim))
    mask = masks.causal(9)
    result = attend(*tensors, mask, backend="hopper")
    assert_attention(result, tensors, mask.to_dense())


def test_strided_views_are_read_where_they_lie(device):
    packed = torch.randn(11, 8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    head_major = torch.randn(4, 11, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    for query in (q, head_major.transpose(0, 1)):
        result = attend(query, k, v, masks.causal(11), backend="hopper")
        assert_attention(result, (query, k, v), masks.causal(11).to_dense())


def test_zero_scale_means_equal_weights(device):
    tensors = draw(6, 6)
    mask = masks.causal(6)
    result = attend(*tensors, mask, backend="hopper", softmax_scale=0.0)
    assert_attention(result, tensors, mask.to_dense(), softmax_scale=0.0)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5, 5)])
def test_nothing_is_launched_when_no_row_has_keys(device, shape):
    tensors = draw(*shape)
    mask = masks.from_slices(*shape, [])
    out, lse = attend(*tensors, mask, backend="hopper")
    assert out.shape == (shape[0], 4, 64) and (out == 0).all()
    assert (lse == -torch.inf).all()
    sink = torch.tensor([0.5, 1.0, -1.0, 2.0])
    out, lse = attend(*tensors, mask, backend="hopper", sink=sink)
    assert (out == 0).all() and (lse == sink).all()
    assert device.launches == []


def test_launch_has_a_block_per_multiprocessor_but_no_more_than_there_is_work(device):
    attend(*draw(3, 3), masks.causal(3), backend="hopper")
    attend(*draw(700, 20), masks.full(700, 20), backend="hopper")
    variant = build.variants()["fwd_bf16_64"]
    threads, shared = int(variant.value("MCP_THREADS")), int(variant.value("MCP_SHARED_BYTES"))
    num_tiles = -(-700 // int(variant.value("MCP_BLOCK_M")))
    assert device.launches == [(4, threads, shared, 7), (num_tiles * 4, threads, shared, 7)]


@pytest.mark.parametrize(
    ("num_keys", "sections"), [(1 << 10, 64), (1 << 15, 16), (1 << 17, 8), (1 << 22, 8)]
)
def test_head_sections_are_those_whose_keys_fit_the_cache(num_keys, sections):
    # 8 kv heads of 64 query heads, 128 + 128 columns of 2 bytes: 2^15 keys are 16 MB per kv head.
    assert hopper_launch.heads_per_section(64, 8, num_keys, 256, 32 << 20) == sections


# ---------------------------------------------------------------------- caches


def test_second_call_plans_and_describes_nothing_again(device, monkeypatch):
    tensors, mask = draw(40, 40), masks.causal(40)
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
        assert_attention(result, (x, x, x), masks.causal(rows).to_dense())


def test_equal_masks_are_planned_apart_and_a_list_goes_with_its_mask(device):
    mask, twin = masks.causal(8), masks.causal(8)
    attend(*draw(8, 8), mask, backend="hopper")
    attend(*draw(8, 8), twin, backend="hopper")
    assert device_arrays.num_cached() == 2
    del mask
    gc.collect()
    assert device_arrays.num_cached() == 1


def test_another_tile_shape_gets_a_list_of_its_own(device):
    mask, dense = masks.causal(300), masks.causal(300).to_dense()
    for dims in ((128, 128), (192, 192)):
        tensors = draw(300, 300, (1, 1), dims)
        assert_attention(attend(*tensors, mask, backend="hopper"), tensors, dense)
    assert device_arrays.num_cached() == 2


def test_every_stream_has_work_counters_of_its_own(device, monkeypatch):
    addresses = [gpu.counters(0, stream).address for stream in (7, 8, 7, 9)]
    assert addresses[0] == addresses[2]
    assert len(set(addresses)) == 3
    apart = np.diff(sorted(set(addresses)))
    assert (apart >= 8).all()
    for stream in range(100, 100 + gpu.MAX_STREAMS - 3):
        gpu.counters(0, stream)
    with pytest.raises(RuntimeError, match=r"stream 5 is number 257 .* at most 256 .* reuse"):
        gpu.counters(0, 5)


def test_streams_that_begin_together_share_no_counters(device):
    barrier, found = threading.Barrier(8), []

    def first_use(stream):
        barrier.wait(timeout=HANG_SECONDS)
        found.append(gpu.counters(0, stream).address)

    threads = [threading.Thread(target=first_use, args=(100 + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANG_SECONDS)
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
    tensors = [x.to(**where) if where else x for x in draw(4, 4)]
    with pytest.raises(NotImplementedError, match=message):
        attend(*tensors, masks.causal(4), backend="hopper")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"dtype": torch.float32}, {}, r"dtype=torch.float32, only torch.bfloat16 and .*flex"),
        ({"dims": (288, 288)}, {}, r"head_dim=288, value head_dim=288, only for \(64, 64\), .*"),
        ({"dims": (64, 264)}, {}, r"head_dim=64, value head_dim=264, only for"),
        ({}, {"softmax_scale": -0.5}, r"softmax_scale=-0.5 < 0; negate q and the scale"),
    ],
)
def test_wishes_without_a_kernel_name_what_there_is(device, change, options, message):
    with pytest.raises(NotImplementedError, match=message):
        attend(*draw(4, 4, **change), masks.causal(4), backend="hopper", **options)
    assert device.launches == []


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_compute_capabilities_are_refused(device, monkeypatch, capability):
    monkeypatch.setattr(hopper_checks, "_capability", lambda _: capability)
    hopper_checks._check_kind.cache_clear()
    found = f"{capability[0]}.{capability[1]}"
    with pytest.raises(
        NotImplementedError, match=rf"cuda:0 of compute capability {found}, only on 9\.0 .*'flex'"
    ):
        attend(*draw(4, 4), masks.causal(4), backend="hopper")


def _forget():
    """Lets the checks look at the variants again."""
    for cached in ("find_variant", "find_gradient_kernels", "built_dims", "_check_kind"):
        getattr(hopper_checks, cached).cache_clear()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("which", range(4))
def test_gradients_without_a_kernel_are_refused_at_the_call(device, monkeypatch, which, softcap):
    def others(kind):
        return not kind[0].startswith("backward")

    kept = {kind: v for kind, v in hopper_checks._variants().items() if others(kind)}
    monkeypatch.setattr(hopper_checks, "_variants", lambda: kept)
    _forget()
    tensors, sink = draw(4, 4), torch.zeros(4)
    (*tensors, sink)[which].requires_grad_()
    cap = " and softcap" if softcap else ""
    message = rf"no backward kernel for head_dim=64, value head_dim=64{cap}, only for .*backend='flash', 'flex'"
    with pytest.raises(NotImplementedError, match=message):
        attend(*tensors, masks.causal(4), backend="hopper", sink=sink, softcap=softcap)
    assert device.launches == []
    _forget()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),  # last dimension is strided
        lambda x: torch.cat([x, x[..., :4]], dim=-1)[..., :64],  # rows begin at 8 bytes
        lambda x: torch.cat([x.flatten(), x.flatten()])[4 : 4 + x.numel()].view(x.shape),  # address
    ],
)
@pytest.mark.parametrize("which", range(3))
def test_layouts_that_the_copy_engine_cannot_read_are_copied(device, change, which):
    tensors = draw(8, 8)
    tensors[which] = change(tensors[which])
    assert not hopper_checks.is_readable(tensors[which])
    found = attend(*tensors, masks.causal(8), backend="hopper")
    assert_attention(found, tensors, masks.causal(8).to_dense())
    with pytest.raises(ValueError, match=r"^q of strides .* multiple of 8 .*; call q\.contiguous"):
        hopper_checks.check_layout("q", tensors[which])  # what a launch would say


@pytest.mark.parametrize(
    "row", [(0, 9, 0, 4, -99, 99), (0, 4, 0, 9, -99, 99), (0, 4, -3, 2, -9, 9)]
)
def test_mask_whose_slices_leave_the_tensors_is_refused(device, row):
    mask = masks.AttentionMask(8, 8, np.array([row]))  # this constructor does not check
    with pytest.raises(ValueError, match=r"outside the grid 8 x 8; build masks with from_slices"):
        attend(*draw(8, 8), mask, backend="hopper")
    assert device.launches == []


def test_first_call_with_a_mask_inside_a_graph_capture_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    message = r"with a mask must not be inside a CUDA graph capture; call it once before, and keep"
    for make in (device_lists.forward_list, device_lists.backward_list):
        on = torch.device("cuda", 0)
        is_forward = make is device_lists.forward_list
        with pytest.raises(RuntimeError, match=message):
            if is_forward:
                make(masks.causal(4), 128, 128, on)
            else:
                make(masks.causal(4), (128, 128), (128, 64), on, in_order=True)
    assert device_arrays.num_cached() == 0


class _Recorder:
    """Stands for a CUDA tensor and event; notes who waits."""

    device = torch.device("cuda", 0)

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name)


def test_another_stream_waits_once_for_the_copy_and_a_capture_does_not(device, monkeypatch):
    mask = masks.causal(4)
    on_cpu = torch.device("cpu")
    streams = iter((7, 8, 8, 7, 8, 7))
    monkeypatch.setattr(device_arrays, "current_stream", lambda _: next(streams))
    monkeypatch.setattr(device_memory, "current_stream", lambda _: 7)
    device_lists.forward_list(mask, 128, 128, on_cpu)
    (entry,) = device_arrays._entries.values()
    data, stream = _Recorder(), _Recorder()
    entry.arrays.data, entry.arrays.filled = data, object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    device_lists.forward_list(mask, 128, 128, on_cpu)
    assert (stream.calls, data.calls) == ([], [])
    capturing[0] = False
    for _ in range(4):
        device_lists.forward_list(mask, 128, 128, on_cpu)
    assert (stream.calls, data.calls) == (["wait_event"], ["record_stream"])


def test_device_that_is_not_current_is_made_so_for_the_launch(device, monkeypatch):
    entered = []

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            entered.append("left")

    monkeypatch.setattr(gpu, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    attend(*draw(4, 4), masks.causal(4), backend="hopper")
    assert entered == [0, "left"]
    monkeypatch.setattr(gpu, "current_device", lambda: 0)
    attend(*draw(4, 4), masks.causal(4), backend="hopper")
    assert entered == [0, "left"]


def test_hopper_is_never_chosen_by_itself():
    q, k, v = (x.to("meta") for x in draw(4, 4))
    assert resolve_options(q, k, v).backend == "flex"
