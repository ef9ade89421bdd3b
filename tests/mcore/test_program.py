"""What Megatron-LM's own program is told when it imports the spec of its command line."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_cp.mcore.versions.program import check_builds_predictions

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
