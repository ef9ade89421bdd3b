"""An existing Megatron-Core model gets context parallelism by one line; batches stay as Megatron splits them.

    torchrun --nproc-per-node 2 examples/inside_megatron_core.py

Proves: training with our attention on all ranks gives the losses of Megatron's own attention on one rank.
"""

from pathlib import Path

from megatron_cp.mcore import cpu

cpu.install()  # Megatron-Core on a machine without CUDA; does nothing where there is a GPU

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megatron_cp.mcore import with_context_parallel  # noqa: E402
from megatron_cp.report.draw.charts import Axes, Series, line_chart  # noqa: E402
from megatron_cp.report.draw.html import Section, page, write_page  # noqa: E402

VOCABULARY, SEQ_LENGTH, STEPS = 64, 256, 5


def build_model(cp_size, spec):
    """Returns a two-layer GPT; nothing here knows of megatron_cp."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        context_parallel_size=cp_size,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    return GPTModel(config, spec, VOCABULARY, SEQ_LENGTH, position_embedding_type="rope").to(
        torch.cuda.current_device()
    )


def zigzag(x, rank, size):
    """Returns Megatron's rows of a rank: pieces r and 2P-1-r of 2P."""
    pieces = x.chunk(2 * size, dim=1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim=1)


def train(cp_size, spec):
    """Returns the loss of every step, over the whole sequence."""
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    group = parallel_state.get_context_parallel_group()
    model = build_model(cp_size, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        whole = torch.randint(VOCABULARY, (2, SEQ_LENGTH + 1), generator=generator)
        tokens, labels = (
            zigzag(x, group.rank(), cp_size).to(torch.cuda.current_device())
            for x in (whole[:, :-1], whole[:, 1:])
        )
        loss = model(tokens, None, None, labels=labels).sum() / (2 * SEQ_LENGTH)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)  # what Megatron's DDP does
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    parallel_state.destroy_model_parallel()
    return losses


def points(losses):
    """Returns what a chart draws."""
    return tuple((float(step), loss) for step, loss in enumerate(losses))


def main():
    """Trains twice and compares."""
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    ours = train(dist.get_world_size(), with_context_parallel(get_gpt_layer_local_spec()))
    megatrons = train(1, get_gpt_layer_local_spec())
    for step, (a, b) in enumerate(zip(ours, megatrons, strict=True)):
        assert abs(a - b) < 1e-5 * b, (step, a, b)
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {a:.6f} on {dist.get_world_size()} ranks, {b:.6f} by Megatron's attention"
            )
    if dist.get_rank() == 0:
        path = Path("runs", "inside_megatron_core.html")
        lines = [
            Series("megatron_cp", points(ours)),
            Series("Megatron", points(megatrons), 2, "dots"),
        ]
        drawn = line_chart("losses", lines, Axes(x_label="step", y_label="loss"))
        write_page(
            path, page("Losses", __doc__.split("\n")[0], [Section("losses", "Losses", [drawn])], {})
        )
        print(f"picture: {path}\nnext: make pretrain")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
