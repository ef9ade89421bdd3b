"""The lines of docs/megatron.md that make models with experts and latent attention, run as they are."""

import re
from pathlib import Path

import pytest

from tests.mcore.test_latent import dense_attention_in_place_of_ours
from tests.mcore.tiny_gpt import Case, fill_by_name, parallel_state
from tests.ranks import run_on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"


def _blocks() -> list[str]:
    """The indented blocks of the section, without their indentation."""
    section = PAGE.read_text().split("## Experts and latent attention\n")[1].split("\n## ")[0]
    blocks = re.findall(r"(?:^    .*\n)+", section, flags=re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks]


def _kernels() -> dict[str, bool]:
    """The fields that the page's section on CPU ranks names."""
    section = PAGE.read_text().split("## CPU ranks\n")[1].split("\n## ")[0]
    return {name: value == "True" for name, value in re.findall(r"`(\w+)=(True|False)`", section)}


def _losses(rank, world_size, place):
    """Loss of the page's model, and of the same weights under Megatron's spec or a dense softmax."""
    import torch

    with parallel_state(Case(cp=1)):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        names = {"cp_size": 1, "ep_size": 1, "kernels": _kernels()}
        for block in _blocks()[: place + 1]:
            exec(compile(block, str(PAGE), "exec"), names)
        model, config = names["model"], names["config"]
        if place == 0:
            spec = get_gpt_decoder_block_spec(config, False)
            other = names["GPTModel"](config, spec, 1024, 4096, position_embedding_type="rope")
        else:
            with dense_attention_in_place_of_ours():
                spec = names["gpt_block_spec"](config)
            other = names["GPTModel"](config, spec, 1024, 4096, position_embedding_type="rope")
        tokens = torch.arange(64)[None] * 7 % 1024
        positions = torch.arange(64)[None]
        mask = torch.ones(64, 64, dtype=torch.bool).triu(1)[None, None]
        losses = []
        for each in (model, other):
            fill_by_name(each.eval())  # no hidden dropout
            losses.append(each(tokens, positions, mask, labels=tokens.roll(-1)).mean().item())
        return losses, [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("place", [0, 1], ids=["experts", "latent attention"])
def test_the_pages_model_computes_what_megatrons_does(place: int):
    (((ours, own), names),) = run_on_ranks(1, _losses, place)
    assert ours == pytest.approx(own, rel=1e-6)
    part = ("layers.3.mlp.experts", "linear_kv_up_proj")[place]
    assert any(part in name for name in names)
