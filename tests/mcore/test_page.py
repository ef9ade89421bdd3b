"""The lines of docs/megatron.md that make models and train them on planned packs, run as they are."""

import re
from pathlib import Path

import pytest
import torch

from tests.mcore.test_latent import dense_attention_in_place_of_ours
from tests.mcore.tiny_gpt import Case, fill_by_name, make_config, parallel_state
from tests.ranks import run_on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"


def _blocks(title: str) -> list[str]:
    """The indented blocks of a section, without their indentation."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"(?:^    .*\n)+", section, flags=re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks]


def _kernels() -> dict[str, bool]:
    """The fields that the page's section on CPU ranks names."""
    section = PAGE.read_text().split("## CPU ranks\n")[1].split("\n## ")[0]
    return {name: value == "True" for name, value in re.findall(r"`(\w+)=(True|False)`", section)}


def _losses(rank, world_size, place):
    """Loss of the page's model, and of the same weights under Megatron's spec or a dense softmax."""
    with parallel_state(Case(cp=1)):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        names = {"cp_size": 1, "ep_size": 1, "kernels": _kernels()}
        for block in _blocks("Experts and latent attention")[: place + 1]:
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


LENGTHS = [13, 50, 1, 37, 20, 6]
WINDOW = {"window_size": (12, 0), "window_attn_skip_freq": 2}


def _pack():
    """Tokens, labels, loss mask and positions of documents one after the other."""
    ends = torch.tensor(LENGTHS).cumsum(0)
    tokens = torch.arange(sum(LENGTHS)) * 7 % 1024
    loss_mask = torch.ones(len(tokens))
    loss_mask[ends - 1] = 0
    return tokens, tokens.roll(-1), loss_mask, torch.cat([torch.arange(n) for n in LENGTHS])


def _gradients(model, group):
    """The loss's gradient of each parameter, over the context ranks."""
    found = {}
    for name, parameter in model.named_parameters():
        torch.distributed.all_reduce(parameter.grad, group=group)
        found[name] = parameter.grad
    return found


def _train_as_the_page_does(rank, world_size):
    with parallel_state(Case(cp=world_size)) as groups:
        config = make_config(Case(cp=world_size).with_options(**WINDOW))
        group = groups.get_context_parallel_group()
        pack = dict(zip(("tokens", "labels", "loss_mask", "positions"), _pack(), strict=True))
        own = {"cp_group": group, "cp_rank": rank, "device": "cpu", "lengths": LENGTHS}
        block = _blocks("Three ways in")[-1]
        make, train = re.split(r"(?=^plans = )", block, flags=re.MULTILINE)
        from megatron.core.models.gpt import GPTModel

        names = {"GPTModel": GPTModel, "config": config, **pack, **own}
        exec(compile(make, str(PAGE), "exec"), names)
        fill_by_name(names["model"])
        exec(compile(train, str(PAGE), "exec"), names)
        loss, _, _ = names["loss_function"](names["losses"])
        loss.backward()
        torch.distributed.all_reduce(loss, group=group)
        return loss.item(), _gradients(names["model"], group)


def _one_document_after_the_other(rank, world_size):
    with parallel_state(Case()) as groups:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        config = make_config(Case().with_options(**WINDOW))
        spec = get_gpt_decoder_block_spec(config, False)
        model = GPTModel(config, spec, 1024, 4096, position_embedding_type="rope")
        fill_by_name(model)
        total = 0.0
        parts = zip(*(values.split(LENGTHS) for values in _pack()), strict=True)
        for tokens, labels, loss_mask, positions in parts:
            hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)[None, None]
            losses = model(tokens[None], positions[None], hidden, labels=labels[None])
            loss = (losses * loss_mask).sum()
            loss.backward()
            total += loss.item()
        return total, _gradients(model, groups.get_context_parallel_group())


def test_the_pages_planned_pack_trains_as_megatron_does_one_document_after_the_other():
    """Window layers among them, on ranks that do not divide the pack."""
    ((loss, gradients),) = run_on_ranks(1, _one_document_after_the_other)
    for own_loss, own_gradients in run_on_ranks(3, _train_as_the_page_does):
        assert own_loss == pytest.approx(loss, rel=1e-6)
        assert own_gradients.keys() == gradients.keys()
        for name, exact in gradients.items():
            error = (own_gradients[name] - exact).abs().max()
            assert error < 1e-5 * exact.abs().max(), name
