"""Which optimizer is built; groups of parameters that a checkpoint's has, against those of the run's."""

import dataclasses
from types import SimpleNamespace

import pytest

from megatron_cp.training.arguments import judge_arguments
from megatron_cp.training.arguments.machine import GPU_MACHINE
from megatron_cp.training.checkpoint.optimizer_parts import check_groups
from megatron_cp.training.config import TrainConfig
from tests.training.commands import SMALL_RUN


def optimizer(*num_groups: int) -> SimpleNamespace:
    """An optimizer of one part, or with experts of several, each of so many groups."""
    parts = [SimpleNamespace(param_groups=[{}] * number) for number in num_groups]
    return parts[0] if len(parts) == 1 else SimpleNamespace(chained_optimizers=parts)


def saved(*num_groups: int, inner: bool = False) -> dict:
    """What a checkpoint holds of it, the last part first, beside a key that is no part's number."""
    parts = [{"param_groups": [{}] * number} for number in num_groups]
    parts = [{"optimizer": part, "scale": 1.0} for part in parts] if inner else parts
    if len(parts) == 1:
        return parts[0]
    numbered = dict(enumerate(parts))
    return {"param_state_sharding_type": "dp", **dict(reversed(numbered.items()))}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("before", [(2,), (3,), (2, 1), (1, 2), (2, 2), (2, 1, 1)])
@pytest.mark.parametrize("now", [(2,), (2, 1), (1, 2), (2, 1, 1)])
def test_only_as_many_parts_with_other_numbers_of_groups_are_refused(now, before, inner):
    other = [(b, n) for b, n in zip(before, now, strict=False) if b != n]
    if len(before) != len(now) or not other:
        check_groups("folder", optimizer(*now), saved(*before, inner=inner))
        return
    with pytest.raises(ValueError, match=rf"has {other[0][0]} groups .*this run {other[0][1]},"):
        check_groups("folder", optimizer(*now), saved(*before, inner=inner))


@pytest.mark.parametrize("distributed", [False, True])
def test_muon_is_built_as_megatron_core_0_18_and_later_name_it(monkeypatch, distributed):
    """Its configuration says --muon-nesterov by that name, and itself whether layers are spread."""
    from megatron_cp.training import optim

    newer = [("muon_nesterov", bool, False), ("use_layer_wise_distributed_optimizer", bool, False)]
    fields = dataclasses.fields(optim.OptimizerConfig)
    older = [f for f in fields if "muon" not in f.name and f.name != newer[1][0]]
    kept = [(f.name, f.type, dataclasses.field(default=None)) for f in older]
    monkeypatch.setattr(optim, "OptimizerConfig", dataclasses.make_dataclass("Newer", kept + newer))
    built = []
    monkeypatch.setattr(
        optim,
        "get_megatron_optimizer",
        lambda config, model: built.append(config) or SimpleNamespace(param_groups=[]),
    )
    flags = [*SMALL_RUN, "--bf16", "--optimizer", "muon", "--muon-nesterov", "--lr", "2e-3"]
    flags += ["--use-distributed-optimizer"] * distributed
    draft, _ = judge_arguments(flags, {}, GPU_MACHINE)
    optim.build_optimizer(TrainConfig.from_arguments(vars(draft), ()), [])
    (config,) = built
    assert (config.optimizer, config.lr, config.muon_nesterov) == ("muon", 2e-3, True)
    assert config.use_layer_wise_distributed_optimizer == distributed
    assert not config.use_distributed_optimizer
