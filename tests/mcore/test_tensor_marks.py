"""How tensor ranks split a module of ours, as Megatron-FSDP and conversions of weights ask a class they do not know."""

import pytest
import torch

from tests.mcore.packs import SEQUENCE, VOCABULARY
from tests.mcore.stock import stock_program
from tests.mcore.test_experts import EXPERTS
from tests.mcore.tiny_gpt import Case, make_config, parallel_state
from tests.ranks import run_on_ranks

SINKS_AND_EXPERTS = {**EXPERTS, "softmax_type": "learnable"}
DELTA_NETS = {
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "activation_func": torch.nn.functional.silu, "gated_linear_unit": True, "add_bias_linear": False,
}  # fmt: skip


def parameters_of_ours(rank, world_size, tp, options):
    """(class, name, shape, mark) of each parameter that a module of ours holds itself."""
    case = Case(tp=tp).with_options(**options)
    with stock_program(), parallel_state(case):
        from megatron.core.models.gpt import GPTModel

        from megatron_cp.mcore.spec import gpt_block_spec

        config = make_config(case)
        model = GPTModel(config, gpt_block_spec(config), VOCABULARY, SEQUENCE)
        found = []
        for module in model.decoder.layers.modules():
            kind = type(module)
            if not kind.__module__.startswith("megatron_cp.") or "Norm" in kind.__name__:
                continue  # every norm is taken for one that all ranks hold
            marks = ("tensor_model_parallel", "partition_dim")
            mark = tuple(getattr(module, one, None) for one in marks)
            for name, value in module.named_parameters(recurse=False):
                found.append((kind.__name__, name, tuple(value.shape), mark))
        return found


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (SINKS_AND_EXPERTS, {"softmax_offset", "weight"}),
        (DELTA_NETS, {"A_log", "dt_bias"}),
    ],
    ids=["sinks and experts", "delta nets"],
)
def test_modules_say_how_tensor_ranks_split_their_parameters(options, names):
    (whole,) = run_on_ranks(1, parameters_of_ours, 1, options)
    parts = run_on_ranks(2, parameters_of_ours, 2, options)[0]
    assert {name for _, name, _, _ in whole} >= names
    for (kind, name, shape, mark), (_, _, part, _) in zip(whole, parts, strict=True):
        halves = [dim for dim, (n, m) in enumerate(zip(shape, part, strict=True)) if n == 2 * m]
        assert mark == ((True, halves[0]) if halves else (False, None)), (kind, name, mark)
