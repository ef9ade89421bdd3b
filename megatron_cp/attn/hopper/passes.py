"""The raw passes of a backend with kernels of its own, as context parallelism calls them: `hopper` and `emulated`."""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim, C copies, P padded rows

from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_cp.attn.merge import PartJoiner
from megatron_cp.attn.options import AttendOptions
from megatron_cp.mask import AttentionMask


class RowStats(NamedTuple):
    """What the main kernel reads per row, float32 `[C, N, P]`: copy c holds row r at r - c, zeros behind row Q."""

    both: Tensor
    """`[2, C, N, P]`"""

    @property
    def lse_2(self) -> Tensor:
        """Returns lse in base 2; +inf for rows without keys."""
        return self.both[0]

    @property
    def delta(self) -> Tensor:
        """Returns delta; 0 for rows without keys."""
        return self.both[1]

    def addresses(self) -> tuple[int, int]:
        """Returns where lse and delta begin."""
        begin = self.both.data_ptr()
        return begin, begin + self.both.nbytes // 2

    def delta_of_rows(self, num_rows: int) -> Tensor:
        """Returns delta as `[Q, N]`, a view."""
        _, _, num_heads, padded = self.both.shape
        return self.delta.as_strided((num_rows, num_heads), (1, padded))


class Passes(PartJoiner, Protocol):
    """The raw passes of a backend, and its kernels that join results."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        options: AttendOptions,
        max_logits_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns `(out, lse)`; raises `max_logits` to the largest logit of each head."""

    def backward(  # noqa: PLR0913  what the pass needs, and how its results are stored
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: AttentionMask,
        options: AttendOptions,
        rounded: bool = False,
        stats: RowStats | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `(dq, dk, dv)`, or `rounded` to the dtype of q; `stats`: of these rows, where they are known."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        sink_N: Tensor | None,
        options: AttendOptions,
        max_logits_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns `(out, lse)`, sink included, differentiable."""

    def forward_onto_(
        self,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        options: AttendOptions,
        max_logits_N: Tensor | None = None,
    ) -> None:
        """Merges attention over other keys into a result, in place."""

    def forward_last(
        self,
        held: tuple[Tensor, Tensor] | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        options: AttendOptions,
        sink_N: Tensor | None,
        max_logits_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns `(out, lse)` over these keys and those of `held`, sink included, `out` in the dtype of q."""

    def backward_onto_(  # noqa: PLR0913  as backward, and what to add to
        self,
        dq: Tensor | None,
        dkeys: tuple[Tensor, Tensor] | None,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: AttentionMask,
        options: AttendOptions,
        stats: RowStats | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `(dq, dk, dv)`, dq without softmax_scale; added to a dq and to `dkeys` that are given."""

    def stats_of_result(
        self, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> RowStats:
        """Returns what the kernels of the backward pass read of these rows, `delta = rowsum(dout * out) - dlse`."""

    def row_stats(self, dout: Tensor, lse: Tensor, delta: Tensor) -> RowStats:
        """Returns what they read of rows whose delta is known."""
