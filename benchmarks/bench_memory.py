"""What a training step holds beside weights, with and without the flags that save memory, on one CPU rank.

python benchmarks/bench_memory.py --output benchmarks/results/memory_<hardware>_<date>

A model with the proportions of Llama 3 8B, an eighth as wide, attends causally to one document, in fp32: a CPU is slow
in bf16. Every tensor that torch makes counts from its first operation to its end, in whatever pass; weights, their
gradients and the batch do not. A CPU stands for the device: copies that wait on the host are not counted, and no time
here says anything of a GPU.
"""

import os
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from timing import Cell, Table, argument_parser, environment, publish
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

HIDDEN, MLP, VOCABULARY = 512, 1792, 16_032
MODEL = {
    "num_layers": 8,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": MLP,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "group_query_attention": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "cross_entropy_loss_fusion": True,
}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
LOSS, PARTS = {"loss_chunk_size": 256}, {"mlp_chunks_for_training": 8}
OFFLOAD = {"offload_recompute_inputs": True}
CHOICES: dict[str, dict[str, object]] = {
    "none": {},
    "--loss-chunk-size 256": LOSS,
    "--recompute-granularity full": FULL,
    "both": {**FULL, **LOSS},
    "both, --mlp-chunks-for-training 8": {**FULL, **LOSS, **PARTS},
    "both, --offload-recompute-inputs": {**FULL, **LOSS, **OFFLOAD},
    "all four": {**FULL, **LOSS, **PARTS, **OFFLOAD},
}


class Held(TorchDispatchMode):
    """Bytes of all tensors that operations made and somebody still holds, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operation and counts what it made."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._seen:
            return
        self._seen.add(id(storage))
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, id(storage), storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def know(self, tensor: torch.Tensor) -> None:
        """Counts this tensor as there from the start."""
        self._seen.add(id(tensor.untyped_storage()))


class OnAnotherDevice:
    """Lets a CPU stand for a device whose memory is another than the host's."""

    def __enter__(self) -> None:
        from megatron_cp.runtime import checkpoint, host_memory

        plain = host_memory.put_away

        def put_away(tensor: torch.Tensor) -> Any:
            with _disable_current_modes():
                return plain(tensor)

        self._patches = [
            mock.patch.object(host_memory, "_is_elsewhere", lambda device: True),
            mock.patch.object(host_memory, "put_away", put_away),
            mock.patch.object(checkpoint, "put_away", put_away),
        ]
        for patch in self._patches:
            patch.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for patch in self._patches:
            patch.stop()


def make_step(
    rows: int, flags: dict[str, object]
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Returns a model, and a function that makes its gradients and returns the loss."""
    from megatron_cp import mask
    from megatron_cp.mcore import context_parallel_params, plans_of_mask
    from megatron_cp.models.build import build_model
    from megatron_cp.models.gpt import transformer_config

    arguments = {**MODEL, **flags, "max_position_embeddings": rows}
    config = transformer_config(arguments, dtype=torch.float32)
    torch.manual_seed(0)
    model = build_model(config, arguments, vocab_size=VOCABULARY)
    plans = plans_of_mask(mask.causal(rows), config)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (1, rows + 1)))
    positions = torch.arange(rows)[None]

    def step() -> torch.Tensor:
        params = context_parallel_params(plans, 0, "cpu", cp_group=dist.group.WORLD)
        losses = model(
            tokens[:, :-1], positions, None, labels=tokens[:, 1:], packed_seq_params=params
        )
        loss: torch.Tensor = losses.mean()
        loss.backward()
        return loss.detach()

    return model, step


def measured(rows: int, flags: dict[str, object]) -> tuple[float, float, float]:
    """Returns the most MB that a step held beside weights, its seconds, and the loss."""
    model, step = make_step(rows, flags)
    held = Held()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
        held.know(weight.data)
        held.know(weight.grad)
    started = time.perf_counter()
    with held:
        loss = step()
    return held.most / 1e6, time.perf_counter() - started, float(loss)


def main() -> None:
    """Prints one row for each choice of flags."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    arguments = parser.parse_args()
    from megatron_cp.mcore import cpu

    torch.set_num_threads(1)
    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29577")
    dist.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    rows: list[list[Cell]] = []
    with OnAnotherDevice():
        for name, flags in CHOICES.items():
            most, seconds, loss = measured(arguments.rows, flags)
            rows.append([name, round(most), f"{seconds:.1f}", f"{loss:.5f}"])
    megabytes = arguments.rows * 4 / 1e6
    note = (
        f"{arguments.rows} rows, {MODEL['num_layers']} layers, hidden size {HIDDEN}, MLP {MLP}, {VOCABULARY} words. "
        f"Of these sizes are, in MB: the logits {VOCABULARY * megabytes:.0f}, the rows of a layer "
        f"{HIDDEN * megabytes:.0f}, what an MLP makes of them before its activation {2 * MLP * megabytes:.0f}."
    )
    table = Table("Memory of a step", ("flags", "most MB", "seconds", "loss"), rows, note)
    publish("Memory of a step beside weights", environment(("torch",)), [table], arguments.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
