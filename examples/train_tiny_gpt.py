"""Train a tiny GPT with context parallelism, in code: no command line, no files.

    torchrun --nproc-per-node 2 examples/train_tiny_gpt.py

Every step packs documents of random lengths into one sequence; each rank owns half of its tokens and
attention runs over all of them. Prints the loss, and proves that both ranks hold the same weights.
"""

import os

import numpy as np
import torch
import torch.distributed as dist

from megatron_cp.mcore import cpu
from megatron_cp.mcore.versions import compat

compat.silence_known_warnings()
cpu.install()  # before megatron.core is imported; does nothing where there is a GPU

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

import megatron_cp as mcp  # noqa: E402
from megatron_cp.mcore.batch import context_parallel_params  # noqa: E402
from megatron_cp.models.gpt import Layout, build_gpt, transformer_config  # noqa: E402
from megatron_cp.models.presets import TINY  # noqa: E402
from megatron_cp.report.one_plan import plan_page  # noqa: E402

SEQ_LENGTH, VOCAB, STEPS = 512, 128, 20


def documents(generator: np.random.Generator) -> tuple[list[int], np.ndarray]:
    """Lengths that fill one pack, and its tokens: each document counts upwards from somewhere."""
    lengths: list[int] = []
    while sum(lengths) < SEQ_LENGTH:
        lengths.append(min(int(generator.integers(20, 200)), SEQ_LENGTH - sum(lengths)))
    starts = generator.integers(0, VOCAB, len(lengths))
    return lengths, np.concatenate(
        [(s + np.arange(n)) % VOCAB for s, n in zip(starts, lengths, strict=True)]
    )


def main() -> None:
    """Trains on all ranks of the job as one context-parallel group."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    cp_size = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    group = parallel_state.get_context_parallel_group()

    model = build_gpt(
        transformer_config(TINY, layout=Layout(context=cp_size)), TINY, vocab_size=VOCAB
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = np.random.default_rng(0)  # the same documents on every rank
    for step in range(1, STEPS + 1):
        lengths, tokens = documents(generator)
        mask = mcp.mask.documents(lengths, within="causal")
        config = mcp.CPConfig(
            num_heads=TINY["num_attention_heads"],
            num_kv_heads=TINY["num_query_groups"],
            topology="cpu",
        )
        plan = mcp.make_plan(mask, cp_size, config=config)

        in_document = np.concatenate([np.arange(n) for n in lengths])
        has_successor = np.roll(in_document, -1) > 0  # a document's last token has none
        whole = (tokens, np.roll(tokens, -1), in_document, has_successor)
        # This rank's rows. Where ranks do not divide the tokens the last rows are padding: zeros, which do not count.
        token_ids, labels, positions, counts = (
            mcp.dispatch(torch.from_numpy(x), plan, group)[None] for x in whole
        )

        params = context_parallel_params(
            {"full": plan}, group.rank(), "cpu", position_ids=in_document
        )
        losses = model(token_ids, positions, None, labels=labels, packed_seq_params=params)
        loss = (losses * counts).sum() / (SEQ_LENGTH - len(lengths))
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # each rank has the gradient of its own tokens
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()

        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        if dist.get_rank() == 0 and step % 5 in (0, 1):
            print(
                f"step {step:3d}   documents {len(lengths)}   loss {total.item():.4f}", flush=True
            )

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(cp_size)]
    dist.all_gather(everywhere, weights)
    assert all(torch.equal(weights, other) for other in everywhere)
    if dist.get_rank() == 0:
        print(f"{weights.numel()} weights are bitwise equal on {cp_size} ranks")
        picture = plan_page(plan).write("runs/train_tiny_gpt.html")  # of the last step's pack
        print(
            f"picture: {picture}\nnext: torchrun --nproc-per-node 2 examples/inside_megatron_core.py"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
