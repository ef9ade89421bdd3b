"""Which launch commands are accepted: verdicts, the table of blockers, and bad input."""

import json
from pathlib import Path

import pytest

from tests.training.commands import DATA, MODEL, SMALL_RUN, STEPS
from tools import check_recipes
from tools.recipes import published

DEFAULT_DROPOUT = [word for word in MODEL if word != "--attention-dropout"]
DEFAULT_DROPOUT.remove("0.0")
RECIPES = [
    {"name": "plain", "world_size": 1, "argv": SMALL_RUN},
    {
        "name": "noted",
        "world_size": 2,
        "argv": [*DEFAULT_DROPOUT, *DATA, *STEPS, "--use-mcore-models"],
    },
    {
        "name": "refused",
        "world_size": 2,
        "argv": [
            *SMALL_RUN,
            "--moe-expert-rank-capacity-factor",
            "8",
            "--context-parallel-size",
            "3",
        ],
    },
    {
        "name": "also refused",
        "world_size": 1,
        "argv": [*SMALL_RUN, "--moe-expert-rank-capacity-factor", "4"],
    },
]


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "recipes.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_recipes_are_accepted_noted_or_refused_for_every_reason(tmp_path: Path, capsys):
    assert check_recipes.main([str(write(tmp_path, {"recipes": RECIPES}))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "plain: accepted on 1 ranks"
    assert lines[1] == "noted: accepted with notes on 2 ranks"
    assert lines[2].startswith("    --use-mcore-models changes nothing here")
    assert lines[3] == "refused: refused on 2 ranks"
    assert lines[4].startswith(
        "    --moe-expert-rank-capacity-factor is an argument of Megatron-LM"
    )
    assert lines[5].startswith("    world size 2 must be a multiple")
    table = lines.index("recipes  alone  reason")
    assert lines[table + 1].split()[:3] == ["2", "1", "--moe-expert-rank-capacity-factor"]
    assert lines[table + 2].split()[:3] == ["1", "0", "world"]
    assert lines[-1] == "2 of 4 recipes accepted, 1 of them with notes; 2 refused."


def test_experts_get_the_ranks_they_need_and_shell_words_are_expanded(tmp_path: Path, capsys):
    experts = [
        "--num-experts",
        "4",
        "--expert-model-parallel-size",
        "4",
        "--global-batch-size",
        "4",
    ]
    modules = ["--moe-grouped-gemm", "--bf16", "--recompute-granularity", "selective"]
    modules += ["--recompute-modules", "[moe_act", "mlp]", "--seed", "${REPEAT}"]
    recipe = {"name": "experts", "world_size": 2, "argv": [*SMALL_RUN, *experts, *modules]}
    path = write(tmp_path, {"recipes": [recipe]})
    check_recipes.main([str(path)])
    assert capsys.readouterr().out.splitlines()[0] == "experts: accepted with notes on 4 ranks"
    check_recipes.main([str(path), "--here"])
    assert "moe_act needs --moe-grouped-gemm" in capsys.readouterr().out


def test_words_reach_the_program_as_the_shell_of_a_test_harness_gives_them(tmp_path: Path, capsys):
    ramp = ["--rampup-batch-size", "[2", "2", "4]", "--train-samples", "8", "--lr", "1e-3"]
    stages = ["--pipeline-model-parallel-layout", r"Et\\|\\(t\\|\\)*1L"]
    size = ["--pipeline-model-parallel-size", "3", "--micro-batch-size", "1"]
    recipe = {"name": "a", "world_size": 3, "argv": [*MODEL, *DATA, *ramp, *stages, *size]}
    check_recipes.main([str(write(tmp_path, {"recipes": [recipe]}))])
    assert capsys.readouterr().out.splitlines()[0].startswith("a: accepted")


def test_another_number_of_ranks_can_be_judged(tmp_path: Path, capsys):
    path = write(tmp_path, {"recipes": [RECIPES[2]]})
    check_recipes.main([str(path), "--world-size", "3"])
    assert "world size" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "is not JSON"),
        ([], "must hold"),
        ({"recipes": []}, "must hold"),
        ({"recipes": [{"name": "a", "world_size": "1", "argv": []}]}, "recipe 0"),
        ({"recipes": [RECIPES[0], {"name": "a", "world_size": 0, "argv": []}]}, "recipe 1"),
        ({"recipes": [{"name": "a", "world_size": 1, "argv": "--lr"}]}, "recipe 0"),
        (None, "No such file"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path: Path, capsys, content, named: str):
    path = tmp_path / "missing.json" if content is None else write(tmp_path, content)
    with pytest.raises(SystemExit) as stop:
        check_recipes.main([str(path)])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("check_recipes.py: error: ")
    assert named in line


def test_a_checkout_of_megatron_lm_is_read_as_its_tests_launch_it(tmp_path: Path, capsys):
    cases = tmp_path / "tests" / "functional_tests" / "test_cases"

    def write_test(name: str, *lines: str) -> None:
        (cases / name).mkdir(parents=True)
        text = "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n" + "".join(f"  {line}\n" for line in lines)
        (cases / name / "model_config.yaml").write_text(text)

    flags = [
        "--num-layers: 2", "--tensor-model-parallel-size: 2", "--context-parallel-size: 2", "--swiglu: true",
        "--bf16: false", "--lr: 4.5e-4", "--split: 99,1,0", "--train-samples: 0:384 200B:768", "--x: [1, two]",
    ]  # fmt: skip
    write_test("gpt/own", *flags)
    write_test("gpt/own_1node", *flags)
    write_test("moe/of_experts", "--num-experts: 4")
    write_test("gpt/gpt_dynamic_inference", "--num-layers: 2")
    write_test("bert/another_model", "--num-layers: 2")
    first, same, experts = published.read_recipes(tmp_path)
    assert (first.name, first.world_size) == ("gpt/own", 4)
    assert first.argv == (
        "--num-layers", "2", "--tensor-model-parallel-size", "2", "--context-parallel-size", "2", "--swiglu",
        "--lr", "0.00045", "--split", "99,1,0", "--train-samples", "0:384", "200B:768", "--x", "1", "two",
    )  # fmt: skip
    assert same.argv == first.argv
    assert (experts.name, experts.world_size) == ("moe/of_experts", 1)
    assert check_recipes.main([str(tmp_path)]) == 0
    assert "0 of 2 recipes accepted" in capsys.readouterr().out


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        check_recipes.main([str(tmp_path)])
    assert "give a checkout of Megatron-LM or a JSON file" in capsys.readouterr().err
