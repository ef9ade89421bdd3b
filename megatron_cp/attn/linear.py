"""Linear attention of one device, in chunks: every piece of a stream is a linear map of the state before it.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T                                            g given or 0
    S_t = (1 - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T              the gated delta rule
    o_t = S_t^T q_t

Over a chunk of tokens, and over any number of chunks, S_after = P S_before + B, with P diagonal or, under the delta
rule, a matrix. So a chunk is reduced to its map, maps are applied one after the other (`scan`), and outputs are a
product with the state before their chunk plus what the chunk gives itself. Memory is O(tokens x chunk). Autograd does
the rest.

Sources: the chunked form, GLA (arXiv 2312.06635); the delta rule in it, DeltaNet (arXiv 2406.06484) and Gated DeltaNet
(arXiv 2412.06464). Only sums of g are exponents, so nothing overflows where g is at most 0.
"""

# n chunks, C tokens of a chunk, H heads, K key dim, V value dim, E = K decays of a head, or 1 for all of it

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_cp.mask.interval import IntArray, expand_ranges


@dataclass(frozen=True)
class Chains:
    """Links of several chains, first links first, the longest chain first: step t takes `widths[t]` links at once.

    Three chains of 3, 2 and 1 links: links 0, 3, 5 and 1, 4 and 2, widths (3, 2, 1).
    """

    widths: tuple[int, ...]

    @classmethod
    def of(cls, num_links: IntArray) -> "Chains":
        """Returns chains of so many links, one at least each, not increasing."""
        steps = np.arange(num_links.max(initial=0))
        shorter = np.sort(num_links).searchsorted(steps, side="right")
        return cls(tuple((len(num_links) - shorter).tolist()))

    @property
    def num_chains(self) -> int:
        """Returns how many chains there are."""
        return self.widths[0] if self.widths else 0

    @property
    def first_link(self) -> IntArray:
        """Returns the link of chain 0 at each step; that of chain i, where it has one, is i further."""
        return np.cumsum([0, *self.widths])[:-1]

    def links(self) -> tuple[IntArray, IntArray]:
        """Returns step and chain of each link."""
        return expand_ranges(np.zeros(len(self.widths), np.int64), np.array(self.widths, np.int64))


@dataclass(frozen=True)
class Maps:
    """S -> P S + B for each chunk or segment: `transition` `[n, H, K, 1 or K]`, `added` `[n, H, K, V]`."""

    transition: Tensor
    added: Tensor

    @classmethod
    def unpacked(cls, both: Tensor, value_dim: int) -> "Maps":
        """Returns the maps that stand side by side, (B, P), as they travel: `[n, H, K, V + (1 or K)]`."""
        return cls(both[..., value_dim:], both[..., :value_dim])

    def identity(self, num_chains: int) -> Tensor:
        """Returns the maps (0, 1) side by side: a scan of `widened` maps makes of each the map of its chain."""
        keys, width = self.transition.shape[-2:]
        one = torch.ones if width == 1 else torch.eye
        one_KE = one(keys, width, dtype=self.added.dtype, device=self.added.device)
        zero = self.added.new_zeros((num_chains, *self.added.shape[1:]))
        return torch.cat([zero, one_KE.expand(*zero.shape[:2], keys, width)], dim=-1)

    def widened(self, index: Tensor) -> "Maps":
        """Returns maps `index` as they act on maps side by side: P (B', P') + (B, 0)."""
        transition, added = (x.index_select(0, index) for x in (self.transition, self.added))
        return Maps(transition, torch.cat([added, torch.zeros_like(transition)], dim=-1))


def scan(maps: Maps, initial: Tensor, chains: Chains) -> tuple[Tensor, Tensor]:
    """Returns the states before and after each link, `[n, H, K, V]` each; `initial` `[chains, H, K, V]`.

    Both hang on both arguments in autograd's graph, also where there is no link.
    """
    state, before, after = initial, [initial[:0]], [maps.added[:0]]
    # split, not slices: the gradient of each slice would be as large as the whole
    steps = (x.split(chains.widths) for x in (maps.transition, maps.added))
    for transition, added in zip(*steps, strict=True):
        state = state[: len(added)]
        before.append(state)
        moved = transition * state if transition.shape[-1] == 1 else transition @ state
        state = moved + added
        after.append(state)
    return torch.cat(before), torch.cat(after)


@dataclass(frozen=True)
class Chunks:
    """Chunks reduced to their maps, and what their outputs are made of."""

    maps: Maps
    _q: Tensor
    _k: Tensor
    _g: Tensor
    _since: Tensor
    """What is left of the state before the chunk when a token reads it: `[n, H, C, E]`."""
    _written: Tensor
    """What each token adds to the state under its key, if the chunk starts from nothing: `[n, H, C, V]`."""
    _forgotten: Tensor | None
    """How each token's writing hangs on the state before the chunk: `[n, H, C, K]`; None: not."""

    def without_state(self) -> "ChunkOutputs":
        """Returns the outputs of chunks that start from nothing, and how a state before them is read."""
        scores = decayed_products(self._q, self._k, self._g)
        read = self._q * self._since
        if self._forgotten is not None:
            read = read - scores @ self._forgotten
        return ChunkOutputs(scores @ self._written, read)


@dataclass(frozen=True)
class ChunkOutputs:
    """What chunks give without a state before them, and how such a state is read."""

    out: Tensor
    """`[n, H, C, V]`"""
    read: Tensor
    """`[n, H, C, K]`"""

    def after(self, before_nHKV: Tensor) -> Tensor:
        """Returns the outputs `[n, H, C, V]`, given the states before the chunks."""
        return self.out + self.read @ before_nHKV


def reduce_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Chunks:
    """Returns the maps of chunks; their outputs can be computed later.

    q (scaled), k `[n, H, C, K]`, v `[n, H, C, V]`, g `[n, H, C, E]`, beta `[n, H, C, 1]`; C is a power of two. Rows of
    zeros change nothing.
    """
    total, since = g.sum(-2, keepdim=True), g.cumsum(-2).exp()
    left_HKC = (k * _sums_after(g).exp()).transpose(-1, -2)  # what is left of k at the chunk's end
    transition = total.exp().transpose(-1, -2).expand(*k.shape[:2], k.shape[-1], 1)
    if beta is None:
        return Chunks(Maps(transition, left_HKC @ v), q, k, g, since, v, None)
    # row i writes u_i = beta_i (v_i - what the state holds under k_i), which depends on the rows before it
    lower = beta * decayed_products(k, k, g)
    right = beta * torch.cat([v, k * since], dim=-1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    transition = torch.diag_embed(transition[..., 0]) - left_HKC @ w
    return Chunks(Maps(transition, left_HKC @ u), q, k, g, since, u, w)


def decayed_products(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Returns `sum_k x_ik y_jk exp(g_(j+1)k + ... + g_ik)` for j <= i, else 0: `[..., C, C]`.

    Sums of g are taken over the tokens between, never as differences of longer sums, whose rounding would count
    (Mamba-2, arXiv 2405.21060). With a g for each key channel, halves of blocks meet at the border between them.
    """
    if g.shape[-1] == 1:
        later = torch.ones(x.shape[-2:-1] * 2, dtype=torch.bool, device=x.device).triu(1)
        between = g.expand(*g.shape[:-1], g.shape[-2]).tril(-1).cumsum(-2)
        return (x @ y.transpose(-1, -2)) * between.masked_fill(later, -torch.inf).exp()
    blocks = (x * y).sum(-1)[..., None, None]  # [..., blocks, rows, rows]
    while blocks.shape[-3] > 1:
        x_, y_, g_ = (z.unflatten(-2, (-1, 2, blocks.shape[-1])) for z in (x, y, g))
        there = x_[..., 1, :, :] * g_[..., 1, :, :].cumsum(-2).exp()
        here = y_[..., 0, :, :] * _sums_after(g_[..., 0, :, :]).exp()
        top, bottom = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        top = torch.cat([top, torch.zeros_like(top)], dim=-1)
        bottom = torch.cat([there @ here.transpose(-1, -2), bottom], dim=-1)
        blocks = torch.cat([top, bottom], dim=-2)
    return blocks[..., 0, :, :]


def _sums_after(g: Tensor) -> Tensor:
    """Returns the sum of the rows behind each row, along dim -2."""
    following = torch.nn.functional.pad(g[..., 1:, :], (0, 0, 0, 1))
    return following.flip(-2).cumsum(-2).flip(-2)
