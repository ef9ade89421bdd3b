"""What Megatron-LM's own program is told when it imports the spec of its command line, and what it then gets."""

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

from megatron_cp.mcore.versions.program import check_builds_predictions
from tests.mcore.stock import stock_program
from tests.mcore.tiny_gpt import Case, make_config, parallel_state
from tests.ranks import run_on_ranks

ASKED = {"spec": ["megatron_cp.mcore.spec", "gpt_layer_spec"], "mtp_num_layers": 1}


def check(monkeypatch, version, builds_itself=False, **flags):
    if builds_itself:
        monkeypatch.delitem(sys.modules, "gpt_builders", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "gpt_builders", ModuleType("gpt_builders"))
    variables = ModuleType("megatron.training.global_vars")
    variables._GLOBAL_ARGS = SimpleNamespace(**flags)
    monkeypatch.setitem(sys.modules, variables.__name__, variables)
    check_builds_predictions(version)


@pytest.mark.parametrize("version", [(0, 16, 1), (0, 17, 1), (0, 18, 2)])
def test_predictions_of_a_program_that_cannot_build_them_are_one_line_with_a_way_out(
    monkeypatch, version
):
    with pytest.raises(NotImplementedError, match=r"begin that file .* use_in_every_gpt") as error:
        check(monkeypatch, version, **ASKED)
    assert ".".join(map(str, version)) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ((0, 19, 0), ASKED),
        ((0, 18, 2), ASKED | {"hybrid_layer_pattern": "M*/M*"}),
        ((0, 17, 1), ASKED | {"hybrid_override_pattern": "M*"}),
        ((0, 17, 1), ASKED | {"spec": None}),
        ((0, 17, 1), ASKED | {"mtp_num_layers": None}),
        ((0, 16, 0), ASKED | {"builds_itself": True}),  # slime
    ],
)
def test_other_programs_go_on(monkeypatch, version, flags):
    check(monkeypatch, version, **flags)


def test_a_process_that_is_not_megatron_lm_goes_on(monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars", raising=False)
    check_builds_predictions((0, 16, 1))


def build(kind: str, case: Case) -> None:
    """Builds a model as Megatron-LM does of the spec of its command line."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_cp.mcore.hybrid import hybrid_stack_spec
    from megatron_cp.mcore.spec import gpt_layer_spec
    from megatron_cp.mcore.versions import hybrid_classes

    sizes = {"vocab_size": 64, "max_sequence_length": 64}
    if kind == "hybrid":
        parts = hybrid_classes.hybrid_parts()
        hybrid = {parts.pattern: "*-", parts.spec: hybrid_stack_spec}
        parts.model(make_config(case.with_options(num_layers=2)), **sizes, **hybrid)
    else:
        spec = gpt_layer_spec if kind == "gpt" else get_gpt_layer_local_spec()
        GPTModel(make_config(case), transformer_layer_spec=spec, **sizes)


def optimizers_asked_for(rank, world_size, kind, flag):
    """How often ours was, while a model was built in Megatron-LM's program with that flag."""
    with stock_program(use_distributed_optimizer=flag), parallel_state(Case()):
        from megatron_cp.mcore.checkpoint import fused_adam

        with mock.patch.object(fused_adam, "install_fused_adam") as install:
            build(kind, Case())
        return install.call_count


@pytest.mark.parametrize(
    ("kind", "flag", "count"),
    [("gpt", True, 1), ("hybrid", True, 1), ("gpt", False, 0), ("megatron's", True, 0)],
)
def test_the_distributed_optimizer_of_our_models_can_be_resumed(kind, flag, count):
    """Without Transformer Engine and apex Megatron would take torch's AdamW, whose shards cannot be saved."""
    assert run_on_ranks(1, optimizers_asked_for, kind, flag) == [count]
