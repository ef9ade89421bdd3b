"""What a stage of context parallelism costs beside a pass of its own: results added to others, rows joined.

Causal attention over 16K tokens, GQA 64:8, head dim 128, bf16. A stage merges onto float32 results and adds to float32
gradients where a pass alone writes 16 bits; rows that come home are joined by kernels of their own, whose
bytes are counted: what is read once and written once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp import mask as masks
from megatron_cp.attn.hopper import backend as hopper
from megatron_cp.attn.merge import ByRow
from megatron_cp.attn.options import AttendOptions
from tools.gpu import measure

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 8, 128
NUM_TOKENS = 16384
Calls = dict[str, Callable[[], object]]


def checks() -> dict[str, Callable[[], str]]:
    """Returns the checks by what they are called in the report."""
    return {
        "forward pass of a stage": lambda: _beside_first(Stage("cuda").forward_calls()),
        "backward pass of a stage": lambda: _beside_first(Stage("cuda").backward_calls()),
        "joined rows": lambda: _bandwidths(Rows("cuda")),
    }


def _beside_first(calls: Calls) -> str:
    """Returns the times, and how much longer than the first each takes."""
    times = {name: one.median_ms for name, one in measure.interleaved(calls).items()}
    first = next(iter(times.values()))
    return ", ".join(f"{name} {ms:.3f} ms ({ms / first - 1:+.1%})" for name, ms in times.items())


def _bandwidths(rows: "Rows") -> str:
    times = measure.interleaved(rows.calls())
    return ", ".join(
        f"{name} {times[name].median_ms:.3f} ms ({num_bytes / times[name].median_ms / 1e9:.2f} TB/s)"
        for name, num_bytes in rows.num_bytes().items()
    )


@dataclass
class Stage:
    """Tensors of one stage, and what its passes are called with."""

    device: str
    num_tokens: int = NUM_TOKENS

    def __post_init__(self) -> None:
        """Draws the tensors."""
        n, heads = self.num_tokens, (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
        generator = torch.Generator(self.device).manual_seed(0)
        self.q, self.k, self.v, self.dout = (
            torch.randn(n, count, HEAD_DIM, generator=generator, device=self.device).bfloat16()
            for count in heads
        )
        self.mask = masks.causal(n)
        self.options = AttendOptions(HEAD_DIM**-0.5, 0.0, "hopper")

    def forward_calls(self) -> Calls:
        """Returns the forward passes: alone, the first of a row's parts, one between, the last."""
        given = self.q, self.k, self.v, self.mask, self.options
        held = hopper.forward(*given)
        return {
            "alone": lambda: hopper.forward_last(None, *given, None),
            "first": lambda: hopper.forward(*given),
            "between": lambda: hopper.forward_onto_(*held, *given),
            "last": lambda: hopper.forward_last((held[0], held[1].clone()), *given, None),
        }

    def backward_calls(self) -> Calls:
        """Returns the backward passes: alone, the first on a row's keys, a later one."""
        out, lse = hopper.forward(self.q, self.k, self.v, self.mask, self.options)
        delta = (self.dout.float() * out).sum(dim=-1)
        given = (
            *(self.dout, self.q, self.k, self.v, lse, delta),
            *(self.mask, self.options),
        )
        dq, dk, dv = hopper.backward_onto_(None, None, *given)
        return {
            "alone": lambda: hopper.backward(*given, rounded=True),
            "first": lambda: hopper.backward_onto_(None, None, *given),
            "later": lambda: hopper.backward_onto_(dq, (dk, dv), *given),
        }


@dataclass
class Rows:
    """Rows that parts come home to: as many as there are, and every row two in another order."""

    device: str
    num_rows: int = NUM_TOKENS

    def __post_init__(self) -> None:
        """Draws them."""
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device)

        n = self.num_rows
        self.out, self.lse = draw(n, NUM_HEADS, HEAD_DIM), draw(n, NUM_HEADS)
        self.part_out, self.part_lse = draw(2 * n, NUM_HEADS, HEAD_DIM), draw(2 * n, NUM_HEADS)
        rows = torch.arange(n, device=self.device)
        parts = torch.randperm(2 * n, generator=generator, device=self.device)
        self.by_row: ByRow = (rows, torch.arange(0, 2 * n + 1, 2, device=self.device), parts)

    def calls(self) -> Calls:
        """Returns the kernels' calls, and torch's copy of as many rows beside them."""
        n, target = self.num_rows, torch.empty_like(self.part_out)
        span = self.part_out[:n], self.part_lse[:n]
        return {
            "merged spans": lambda: hopper.merge_parts_(self.out, self.lse, *span),
            "merged rows of two parts": lambda: hopper.merge_parts_(
                self.out, self.lse, self.part_out, self.part_lse, self.by_row
            ),
            "added rows of two parts": lambda: hopper.add_parts_(
                self.out, self.part_out, self.by_row
            ),
            "torch's copy": lambda: target.copy_(self.part_out),
        }

    def num_bytes(self) -> dict[str, int]:
        """Returns what each call reads and writes."""
        held, parts = self.out.nbytes, self.part_out.nbytes
        own, more = self.lse.nbytes, self.part_lse.nbytes
        return {
            "merged spans": 2 * held + parts // 2 + 2 * own + more // 2,
            "merged rows of two parts": 2 * held + parts + 2 * own + more,
            "added rows of two parts": 2 * held + parts,
            "torch's copy": 2 * parts,
        }
