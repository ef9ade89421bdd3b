"""What the kernels of the backward pass are given: their parameters, and how work items share query heads.

Key tiles own rows of dk and dv: no atomics there. Where the query heads of a group are worked on side by side instead
of one after another (`heads_per_item`), they add to dk and dv too; with an order each has a dk and dv of its own first
(`of_heads_apart`).
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp.attn.hopper.checks import GradientKernels, find_gradient_kernels
from megatron_cp.attn.hopper.device_lists import BackwardList
from megatron_cp.attn.hopper.launch import (
    SECTION_BYTES,
    heads_per_section,
    section_bytes,
    tensor_map,
)
from megatron_cp.attn.hopper.machine import Kernel
from megatron_cp.attn.hopper.passes import RowStats
from megatron_cp.attn.hopper.row_stats import stats_map
from megatron_cp.attn.hopper.scores import Scores
from megatron_cp.attn.hopper.worklist import TILE_COST
from megatron_cp.kernels.params import (
    ADD_FLOATS,
    STORE_16_BITS,
    STORE_FLOATS,
    BwdParams,
    BwdPostprocessParams,
    DqParams,
    TensorMap,
)

# As TILE_COST, of an item that adds to float sums: twice the bytes are written, and the sums are cleared and rounded.
ADDING_TILE_COST = 2 * TILE_COST
# What whole groups cost where their rows do not stay in the cache: CTAs of different lengths drift apart until they
# are at different heads. 562 TFLOP/s against 613 with one query head per kv head, causal 32K, head dim 128; 283
# against 423 with 256 (H100, 2026-11-22).
DRIFT = 1.09
# Of keys and values of every query head by itself and their float gradients: a limit of memory, which no plan predicts.
# 8 heads of 128 on 21K keys; beyond, whole groups keep all CTAs busy.
MOST_APART_BYTES = 1 << 28


class BackwardCall(NamedTuple):
    """One backward pass over a list of work: what all of its kernels read."""

    q: Tensor
    """`[Q, N, H]`"""
    k: Tensor
    """`[K, G, H]`"""
    v: Tensor
    """`[K, G, Hv]`"""
    dout: Tensor
    """`[Q, N, Hv]`, in the dtype of q."""
    stats: RowStats
    lists: BackwardList
    scores: Scores

    @property
    def kernels(self) -> GradientKernels:
        """Returns the kernels that the list was made for."""
        dims = self.q.shape[2], self.v.shape[2]
        in_two = self.lists.dq_tiles > 0
        return find_gradient_kernels(self.q.dtype, *dims, self.scores.feature, in_two)

    @property
    def group(self) -> int:
        """Returns how many query heads share a kv head."""
        return self.q.shape[1] // self.k.shape[1]

    def read(self) -> dict[str, Tensor]:
        """Returns what the kernels read, by name."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, "dout": self.dout}
        rows = {"work list": self.lists.data, "lse": self.stats.lse_2, "delta": self.stats.delta}
        return tensors | rows | self.scores.touched()

    def heads_per_item(self, num_sms: int) -> int:
        """Returns how many query heads a work item visits: the whole group, or one, whichever ends sooner.

        In order always the group: which item adds to dk first is chance.
        """
        return self.group if self.lists.in_order else self._heads_that_end_sooner(num_sms)

    def of_heads_apart(self, num_sms: int) -> "BackwardCall | None":
        """Returns the call with keys and values of every query head's own, None where whole groups end as soon.

        Only where sums have an order. Its dk and dv are those of query heads: `sums_of_heads` adds them.
        """
        if not self.lists.in_order:
            return None
        num_keys, num_heads = self.k.shape[0], self.q.shape[1]
        apart_bytes = (4 + 2) * num_keys * num_heads * (self.k.shape[2] + self.v.shape[2])
        if apart_bytes > MOST_APART_BYTES:
            return None
        if self._heads_that_end_sooner(num_sms) == self.group:
            return None
        k, v = (x.repeat_interleave(self.group, dim=1) for x in (self.k, self.v))
        return self._replace(k=k, v=v)

    def sums_of_heads(
        self, gradients: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns dk and dv `[K, G, H]` in `dtype` from those of query heads `[K, N, H]`, added in their order."""
        dk, dv = (x.unflatten(1, (-1, self.group)).sum(dim=2).to(dtype) for x in gradients)
        return dk, dv

    def _heads_that_end_sooner(self, num_sms: int) -> int:
        visits = (self.lists.num_tiles, self.lists.num_visits, self.lists.most_visits)
        shapes = (self.q.shape, self.v.shape)
        return _heads_that_end_sooner(*shapes, *visits, num_sms, section_bytes())

    def room_for_gradients(self, dtype: torch.dtype, heads: int) -> list[Tensor]:
        """Returns memory for dk and dv: float zeros where work items of so many query heads add to them."""
        if heads < self.group or dtype == torch.float32:
            return float_gradients(self.k, self.v, zeros=heads < self.group)
        return [empty_gradient(x, dtype) for x in (self.k, self.v)]

    def main_params(
        self,
        kernel: Kernel,
        gradients: tuple[Tensor | None, Tensor, Tensor],
        heads: int,
        accumulate: bool,
    ) -> BwdParams:
        """Returns the main kernel's parameters without its counters; a work item visits `heads` query heads.

        `gradients` are (sum of dq, dk, dv), without the sum for a kernel of dk and dv alone. With `accumulate` dk and
        dv are added to.
        """
        (dq_sum, dk, dv), lists, scores = gradients, self.lists, self.scores
        store = STORE_FLOATS if dk.dtype == torch.float32 else STORE_16_BITS
        num_tiles, group = lists.num_tiles, self.group
        if accumulate or heads < group:
            num_tiles, store = lists.num_with_queries, ADD_FLOATS
        params = BwdParams.from_buffer_copy(
            _fixed_fields(
                *(self.q.shape, self.v.shape, dk.stride(), dv.stride()),
                *(num_tiles, heads, store),
                *(scores.softmax_scale, scores.softcap, section_bytes()),
            )
        )
        params.q_map, params.dout_map, params.k_map, params.v_map = self._maps(kernel)
        num_queries, num_heads, _ = self.q.shape
        lse_2, delta = self.stats.addresses()
        params.lse_map = stats_map(lse_2, num_queries, num_heads, kernel)
        params.delta_map = stats_map(delta, num_queries, num_heads, kernel)
        if dq_sum is not None:
            params.dq_map = tensor_map("dq", dq_sum, kernel.tile_rows, kernel.driver)
        params.tiles = lists.data.data_ptr()
        params.segments = params.tiles + 16 * lists.num_tiles
        params.order = params.segments + 32 * lists.num_segs
        params.dk, params.dv = dk.data_ptr(), dv.data_ptr()
        if scores.words is not None:
            params.dropout = scores.dropout()
        return params

    def dq_params(self, kernel: Kernel, dq: Tensor) -> DqParams:
        """Returns the parameters of the kernel for dq alone, without counters, factor and whether it adds."""
        (num_keys, num_kv_heads, head_dim), num_heads = self.k.shape, self.q.shape[1]
        lists, stats, width = self.lists, self.stats, head_dim + self.v.shape[2]
        tiles = lists.data.data_ptr() + main_bytes(lists)
        segs = tiles + 16 * lists.dq_tiles
        return DqParams(
            *self._maps(kernel),
            tiles,
            segs,
            segs + 32 * lists.dq_segs,
            None,
            *stats.addresses(),
            dq.data_ptr(),
            *dq.stride()[:2],
            lists.dq_tiles,
            num_heads,
            num_kv_heads,
            heads_per_section(num_heads, num_kv_heads, num_keys, width, section_bytes()),
            num_keys,
            stats.both.shape[3],
            *self.scores.scales(),
            1.0,
            dq.dtype == torch.float32,
            False,
            self.scores.dropout(),
        )

    def _maps(self, kernel: Kernel) -> tuple[TensorMap, ...]:
        on, rows, keys = kernel.driver, kernel.tile_rows, kernel.tile_keys
        return (
            tensor_map("q", self.q, rows, on),
            tensor_map("dout", self.dout, rows, on),
            tensor_map("k", self.k, keys, on),
            tensor_map("v", self.v, keys, on),
        )


def added_to(
    held: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns `held` (dk, dv), with others added to them."""
    dk, dv = (x.add_(more) for x, more in zip(held, gradients, strict=True))
    return dk, dv


def float_gradients(k: Tensor, v: Tensor, *, zeros: bool) -> list[Tensor]:
    """Returns memory for dk and dv in float32, side by side: rows for keys of other ranks go home as they lie."""
    (num_keys, num_heads, k_dim), v_dim = k.shape, v.shape[2]
    width = num_heads * (k_dim + v_dim)
    make = k.new_zeros if zeros else k.new_empty
    both = make((num_keys, width), dtype=torch.float32)
    dk = both.as_strided((num_keys, num_heads, k_dim), (width, k_dim, 1))
    dv = both.as_strided((num_keys, num_heads, v_dim), (width, v_dim, 1), num_heads * k_dim)
    return [dk, dv]


def empty_gradient(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns memory for the gradient of `x`, contiguous, not yet written."""
    return x.new_empty(x.shape, dtype=dtype)


@lru_cache(maxsize=1024)
def _fixed_fields(  # noqa: PLR0913  what it depends on
    q_shape: torch.Size,
    v_shape: torch.Size,
    dk_strides: tuple[int, ...],
    dv_strides: tuple[int, ...],
    num_tiles: int,
    heads: int,
    store: int,
    softmax_scale: float,
    softcap: float,
    num_bytes: int,
) -> BwdParams:
    """Returns the parameters without addresses and dropout: those of all calls alike. To be copied."""
    (num_queries, num_heads, _), num_kv_heads = q_shape, v_shape[1]
    item_bytes, num_items = heads * _row_bytes(q_shape, v_shape), num_heads // heads
    score_scale, cap, cap_scale = Scores(softmax_scale, softcap).scales()
    return BwdParams(
        dk_row_stride=dk_strides[0],
        dk_head_stride=dk_strides[1],
        dv_row_stride=dv_strides[0],
        dv_head_stride=dv_strides[1],
        num_tiles=num_tiles,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        heads_per_section=_items_per_section(item_bytes, num_items, num_bytes),
        heads_per_item=heads,
        items_per_group=num_heads // num_kv_heads // heads,
        num_queries=num_queries,
        score_scale=score_scale,
        cap=cap,
        cap_scale=cap_scale,
        softmax_scale=softmax_scale,
        store=store,
    )


@lru_cache(maxsize=1024)
def _heads_that_end_sooner(
    q_shape: torch.Size,
    v_shape: torch.Size,
    num_tiles: int,
    num_visits: int,
    most_visits: int,
    num_sms: int,
    num_bytes: int,
) -> int:
    """Returns 1 or the size of a group, whichever ends sooner. `num_bytes` of the cache are for what is read again."""
    num_heads, row_bytes = q_shape[1], _row_bytes(q_shape, v_shape)
    group = num_heads // v_shape[1]

    def end(heads: int, tile_cost: float) -> float:
        """Returns when the last section's longest item ends, which begins with that section, or all work, in visits."""
        num_items = num_heads // heads
        every = num_heads * num_visits + num_tiles * num_items * tile_cost
        num_sections = -(-num_items // _items_per_section(heads * row_bytes, num_items, num_bytes))
        before_last = every / num_sms * (1 - 1 / num_sections)
        return max(every / num_sms, before_last + heads * most_visits + tile_cost)

    drift = DRIFT if group * row_bytes > SECTION_BYTES else 1.0
    return 1 if end(1, ADDING_TILE_COST) < drift * end(group, TILE_COST) else group


def _row_bytes(q_shape: torch.Size, v_shape: torch.Size) -> int:
    """Returns the bytes of one query head's rows of q and dout."""
    return q_shape[0] * (q_shape[2] + v_shape[2]) * 2


def main_bytes(lists: BackwardList) -> int:
    """Returns where the list of the kernel for dq begins: the order before it ends at a multiple of 16 bytes."""
    return 16 * lists.num_tiles + 32 * lists.num_segs + -(-lists.num_tiles // 4) * 16


def _items_per_section(item_bytes: int, num_items: int, num_bytes: int) -> int:
    """Returns the items of how many heads run side by side: those whose queries fit `num_bytes` of the cache."""
    return min(num_items, max(1, num_bytes // max(1, item_bytes)))


def postprocess_params(dq_sum: Tensor, dq: Tensor, softmax_scale: float) -> BwdPostprocessParams:
    """Returns the parameters of the kernel that scales and converts dq."""
    return BwdPostprocessParams(
        dq_sum.data_ptr(),
        dq.data_ptr(),
        *dq_sum.stride()[:2],
        *dq.stride()[:2],
        dq.shape[0],
        dq.shape[1],
        softmax_scale,
        dq.dtype == torch.float32,
    )
