"""Which gradients of the Hopper backend come in order because that is faster."""

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn.hopper.device_lists import gradient_work_of
from megatron_cp.attn.options import AttendOptions
from tests.attn.on_host import host_device


@pytest.mark.parametrize(
    ("changed", "is_in_order"),
    [
        ({}, True),
        ({"length": 1024}, False),  # 512.5 keys a row
        ({"num_rows": 8191}, False),
        ({"num_kv_heads": 4}, False),
        ({"num_kv_heads": 4, "num_rows": 16384}, True),
        ({"dim": 64}, False),
        ({"softcap": 1.5}, False),
        ({"adds": True}, False),
    ],
)
def test_where_rows_have_few_keys_gradients_come_in_order(changed, is_in_order):
    asked = {
        "num_rows": 8192,
        "length": 1022,
        "num_kv_heads": 8,
        "dim": 128,
        "softcap": 0.0,
    } | changed
    num_rows, length, dim = asked["num_rows"], asked["length"], asked["dim"]
    lengths = [length] * (num_rows // length)
    mask = masks.documents([*lengths, num_rows - sum(lengths)])
    q, v = (torch.empty(num_rows, heads, dim).half() for heads in (8, asked["num_kv_heads"]))
    options = AttendOptions(0.25, asked["softcap"], "hopper")
    with host_device():
        lists = gradient_work_of(q, v, mask, options, adds=asked.get("adds", False))
    assert lists.in_order == (lists.dq_tiles > 0) == is_in_order
