"""FusedAdam against torch's own, and exact resume of the distributed optimizer."""

import functools
import multiprocessing
import warnings
from types import SimpleNamespace

import pytest
import torch

from megatron_cp.mcore.checkpoint.fused_adam import FusedAdam
from megatron_cp.mcore.checkpoint.parameter_groups import (
    groups_found_at_any_rate,
    name_decoupled_groups,
)
from megatron_cp.training.checkpoint.writer import saving_in_this_process
from tests.mcore.tiny_gpt import Case, Trainer, parallel_state
from tests.ranks import run_on_ranks


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fused_adam_equals_torchs_adam(adam_w_mode: bool, weight_decay: float):
    start = [torch.randn(5, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64)]
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    params, theirs = ([x.clone().requires_grad_() for x in start] for _ in range(2))
    ours = FusedAdam([{"params": params}], adam_w_mode=adam_w_mode, **settings)
    reference = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(theirs, **settings)
    for _ in range(10):
        for mine, other in zip(params, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        ours.step()
        reference.step()
    for mine, other in zip(params, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_the_step_count_lives_in_the_group_and_parameters_without_gradient_stay():
    trained, frozen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = FusedAdam([{"params": [trained, frozen]}, {"params": []}], lr=0.1)
    trained.grad = torch.ones(2)
    optimizer.step()
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
    assert torch.equal(frozen, torch.ones(2)) and not optimizer.state[frozen]
    assert set(optimizer.state[trained]) == {"exp_avg", "exp_avg_sq"}
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)


def _sharded_state(trainer: Trainer, sharding: str, is_loading: bool) -> dict:
    from megatron.core.utils import unwrap_model

    model = unwrap_model(trainer.chunks)[0].sharded_state_dict()
    options = {}
    if trainer.case.distributed_optimizer:
        options = {"metadata": {"distrib_optim_sharding_type": sharding}}
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading, **options)
    return {"model": model, "optimizer": optimizer}


def _load(trainer: Trainer, folder: str, sharding: str) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch thinks of Megatron's calls
        state = dist_checkpointing.load(_sharded_state(trainer, sharding, True), folder)
    unwrap_model(trainer.chunks)[0].load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])


def _save_and_go_on(rank, world_size, case, folder, sharding):
    with parallel_state(case) as groups:
        from megatron.core import dist_checkpointing

        trainer = Trainer(case, groups)
        for _ in range(3):
            trainer.step()
        # The pool's workers are daemons, which may not have children; Megatron's writers are.
        multiprocessing.current_process()._config["daemon"] = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch thinks of Megatron's calls
            with saving_in_this_process():
                dist_checkpointing.save(_sharded_state(trainer, sharding, False), folder)
        return [trainer.step() for _ in range(3)]


def _resume(rank, world_size, case, folder, sharding):
    with parallel_state(case) as groups:
        trainer = Trainer(case, groups)
        for _ in range(3 * 2):  # the data of the steps before
            next(trainer.stream)
        _load(trainer, folder, sharding)
        return [trainer.step() for _ in range(3)]


@functools.cache
def _layout(name: str) -> Case:
    layouts = {
        "cp2": Case(attention="planned", cp=2, distributed_optimizer=True),
        "tp2": Case(attention="planned", tp=2, distributed_optimizer=True),
        "one": Case(attention="planned", distributed_optimizer=True),
        "plain cp2": Case(attention="planned", cp=2),
        "plain megatron": Case(),
    }
    return layouts[name]


@pytest.mark.parametrize(
    ("saved", "resumed", "sharding"),
    [
        ("cp2", "cp2", "dp_reshardable"),
        ("cp2", "cp2", "fully_reshardable"),
        ("cp2", "tp2", "fully_reshardable"),
        ("cp2", "one", "fully_reshardable"),
        ("plain cp2", "plain cp2", "none"),
        ("plain cp2", "plain megatron", "none"),
        ("plain megatron", "plain cp2", "none"),
    ],
)
def test_training_goes_on_where_it_was_saved(tmp_path, saved: str, resumed: str, sharding: str):
    """Also across layouts, and between Megatron's attention and ours."""
    before, after = _layout(saved), _layout(resumed)
    folder = str(tmp_path)
    on = run_on_ranks(before.tp * before.cp, _save_and_go_on, before, folder, sharding)[0]
    again = run_on_ranks(after.tp * after.cp, _resume, after, folder, sharding)[0]
    if saved == resumed:
        assert again == on, "the same layout must resume bit for bit"
    for step, values in enumerate(on):
        assert again[step] == pytest.approx(values, rel=2e-5), step


OF_NEWER_VERSIONS = ("max_lr", "min_lr", "optimizer", "wd_mult", "lr_mult", "is_decoupled_lr")


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (
            {"max_lr": 0.2, "is_decoupled_lr": True},
            ("optimizer", "wd_mult", "lr_mult", "is_decoupled_lr"),
        ),
        (
            {},
            ("optimizer", "wd_mult", "lr_mult", "is_decoupled_lr"),
        ),  # the same group of another chunk
        ({"max_lr": 0.2}, OF_NEWER_VERSIONS),  # told apart by its rate alone
    ],
)
def test_groups_are_known_again_whatever_their_rates_were(
    monkeypatch, others: dict, expected: tuple
):
    from megatron.core.optimizer import distrib_optimizer, optimizer

    modules = (optimizer, distrib_optimizer)
    for module in modules:
        monkeypatch.setattr(module, "param_group_identifier_keys", OF_NEWER_VERSIONS)
    group = {"max_lr": 0.1, "min_lr": 0.0, "wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
    inner = SimpleNamespace(param_groups=[group, group | others])
    with pytest.raises(KeyError), groups_found_at_any_rate(inner, {}):
        assert [module.param_group_identifier_keys for module in modules] == [expected] * 2
        raise KeyError
    assert [module.param_group_identifier_keys for module in modules] == [OF_NEWER_VERSIONS] * 2


@pytest.mark.parametrize("by_rate", [False, True], ids=["before 0.19", "since 0.19"])
def test_a_group_with_a_rate_of_its_own_is_known_in_states_that_call_it_like_the_others(
    monkeypatch, by_rate: bool
):
    """Megatron marks none, in any version: ours are marked while a state is looked through, whoever saved it."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    keys = ("wd_mult", "is_decoupled_lr", *(("max_lr", "min_lr") if by_rate else ()))
    for module in (optimizer, distrib_optimizer):
        monkeypatch.setattr(module, "param_group_identifier_keys", keys)

    def groups(rate: float, marks: bool) -> list[dict]:
        plain = {"wd_mult": 1.0, "max_lr": rate, "min_lr": 0.0, "default_config": True}
        return [
            plain | {"is_decoupled_lr": False},
            plain | {"max_lr": 0.5, "default_config": False, "is_decoupled_lr": marks},
        ]

    inner = SimpleNamespace(param_groups=groups(0.2, marks=False))
    name_decoupled_groups(inner)
    marks = [group["is_decoupled_lr"] for group in inner.param_groups]
    assert marks == [False, not by_rate]
    for saved in (groups(0.1, marks=False), groups(0.1, marks=True)):
        state = {"optimizer": {"param_groups": saved}, "state": {0: {"exp_avg": 1}}}
        with groups_found_at_any_rate(inner, state):
            sought = optimizer.param_group_identifier_keys
            found = {tuple(group[key] for key in sought) for group in saved}
            assert {tuple(group[key] for key in sought) for group in inner.param_groups} == found
            assert len(found) == 2
            inner.param_groups = saved  # as a load does
        assert [group["is_decoupled_lr"] for group in inner.param_groups] == marks
