"""What the GPU check runs: masks x lengths, floating-point operations, and the speeds to reach.

Masks are LongCA-bench's static twelve, exactly as `megatron_cp.plan.study.workloads` defines them, so the same case
can be had by name anywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_cp.mask import AttentionMask
from megatron_cp.plan.study.workloads import LONGCA_MASKS, named_mask

MASKS = tuple(name for name in LONGCA_MASKS if "sparse" not in name)
KILO = 1024
LENGTHS = tuple(KILO * n for n in (1, 2, 4, 8, 16, 32))
NUM_HEADS, NUM_KV_HEADS = 64, 8
BACKWARD_OVER_FORWARD = 2.5  # five products against two

# TFLOP/s on an H200 at 32K, GQA 64:8, D=128, bf16: (forward, backward), as the project set them for itself.
BARS = {
    "full": (700, 612),
    "causal": (688, 586),
    "causal_document": (600, 440),
    "sliding_window_causal": (540, 345),
    "block_causal_document": (600, 400),
}
WIDE_BACKWARD_BAR = 530  # full, D=256


@dataclass(frozen=True)
class Case:
    """One timed shape: GQA 64:8 unless said otherwise, batch folded into the tokens."""

    mask_name: str
    num_tokens: int
    head_dim: int = 128
    value_dim: int = 128
    num_heads: int = NUM_HEADS
    num_kv_heads: int = NUM_KV_HEADS

    @property
    def name(self) -> str:
        """Returns what tables call it."""
        dims = (
            f"{self.head_dim}"
            if self.head_dim == self.value_dim
            else f"{self.head_dim}/{self.value_dim}"
        )
        return f"{self.mask_name} {self.num_tokens // KILO}K D={dims}"

    def mask(self) -> AttentionMask:
        """Returns the mask; documents are drawn from LongCA-bench's lengths with seed 0."""
        return named_mask(self.mask_name, self.num_tokens)

    def tflop(self, kernel_pass: str, area: int) -> float:
        """Returns 10^12 operations that the mask asks for: masked pairs are not counted."""
        forward = 2 * area * self.num_heads * (self.head_dim + self.value_dim) / 1e12
        return forward if kernel_pass == "forward" else BACKWARD_OVER_FORWARD * forward

    def bar(self, kernel_pass: str) -> float | None:
        """Returns the speed to reach on an H200, TFLOP/s, where one is set."""
        if self.num_tokens != 32 * KILO:
            return None
        if (kernel_pass, self.mask_name, self.head_dim) == ("backward", "full", 256):
            return WIDE_BACKWARD_BAR
        if self.head_dim != 128 or self.mask_name not in BARS:
            return None
        return BARS[self.mask_name][0 if kernel_pass == "forward" else 1]


def grid() -> Iterator[Case]:
    """Yields every mask at every length, D=128, longest first: what matters most is measured first."""
    for num_tokens in reversed(LENGTHS):
        for mask_name in MASKS:
            yield Case(mask_name, num_tokens)


def dims() -> Iterator[Case]:
    """Yields the other head dims on the masks that all peers have."""
    for num_tokens in (32 * KILO, 8 * KILO):
        for head_dim, value_dim in ((64, 64), (256, 256), (96, 96), (192, 192), (192, 128)):
            for mask_name in ("full", "causal", "causal_document", "sliding_window_causal"):
                yield Case(mask_name, num_tokens, head_dim, value_dim)
