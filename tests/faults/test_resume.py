"""What a checkpoint meets on resume: another layout, another schedule, another optimizer, damage."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_cp.training.checkpoint.files import MANIFEST, iteration_folder
from tests.faults.program import Launch, Outcome, run_program
from tests.training.commands import DATA, MODEL

pytestmark = pytest.mark.timeout(1800)

RUN = (
    *MODEL, *DATA, "--micro-batch-size", "1", "--global-batch-size", "2", "--lr-decay-iters", "4",
    "--log-interval", "1", "--eval-iters", "0", "--no-wandb",
)  # fmt: skip
LAYOUTS = {
    "tensor": ("--tensor-model-parallel-size", "2"),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
}
SAME = ("--train-iters", "4", "--lr", "1e-3")
OTHER = {
    "learning rate": ("--train-iters", "4", "--lr", "2e-3"),
    "number of steps": ("--train-iters", "6", "--lr", "1e-3"),
}
RICHER = ("--qk-layernorm", "--untie-embeddings-and-output-weights")
REFUSED = {
    **{name: (flags, "--override-opt-param-scheduler") for name, flags in OTHER.items()},
    "optimizer": ((*SAME, "--optimizer", "sgd"), "--no-load-optim"),
    "damage": ((*SAME, "--no-verify-checkpoint"), "cannot be loaded"),
}


def losses_of(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row["lm loss"] for row in rows if "lm loss" in row}


def damage(folder: Path) -> None:
    """Other bytes of the same number in every tensor file: what sizes do not show."""
    for file in folder.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Four steps with a checkpoint after two, and every way to go on from there."""
    root = tmp_path_factory.mktemp("resume")

    def launch(name: str, *flags: str, load: str = "half") -> Launch:
        where = ("--run-dir", str(root / name), "--load", str(root / load))
        return Launch((*RUN, *flags, *where), 2)

    cp2 = ("--context-parallel-size", "2")
    save = ("--save", str(root / "whole"), "--save-interval", "2")
    (whole,) = run_program([Launch((*RUN, *SAME, *cp2, *save), 2)])
    assert [rank.code for rank in whole] == [0, 0], whole[0].stderr[-3000:]
    for name in ("half", "broken"):
        source = iteration_folder(root / "whole", 2)
        shutil.copytree(source, root / name / source.name)
        (root / name / "latest_checkpointed_iteration.txt").write_text("2")
    damage(iteration_folder(root / "broken", 2))
    launches = {name: launch(name, *SAME, *flags) for name, flags in LAYOUTS.items()}
    shutil.copytree(root / "half", root / "theirs")
    (iteration_folder(root / "theirs", 2) / MANIFEST).unlink()  # as Megatron-LM writes it
    launches["richer"] = launch("richer", *SAME, *RICHER, *cp2, "--finetune", load="theirs")
    torch_format = ("--ckpt-format", "torch", "--save", str(root / "torch"), "--save-interval", "2")
    launches["torch"] = launch("torch run", *SAME, *cp2, *torch_format, load="half")
    launches["from torch"] = launch(
        "from torch",
        *SAME,
        *cp2,
        "--override-opt-param-scheduler",
        "--train-iters",
        "5",
        load="torch",
    )
    for name, (flags, _) in REFUSED.items():
        load = "broken" if name == "damage" else "half"
        launches[name] = launch(name, *flags, *cp2, load=load)
    for name, flags in OTHER.items():
        override = "--override-opt-param-scheduler"
        launches[f"override {name}"] = launch(f"override {name}", *flags, *cp2, override)
    return root, dict(zip(launches, run_program(list(launches.values())), strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_context_parallel_checkpoint_goes_on_with_other_parallelism(runs, name: str):
    root, outcomes = runs
    ranks = outcomes[name]
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr[-3000:]
    assert ranks[0].stdout.count("random states are not loaded") == 1
    whole, found = losses_of(root / "whole"), losses_of(root / name)
    assert sorted(found) == [3, 4]
    for iteration, loss in found.items():
        assert loss == pytest.approx(whole[iteration], rel=1e-5)


def test_a_run_goes_from_torch_dist_to_torch_and_on(runs):
    root, outcomes = runs
    for name in ("torch", "from torch"):
        assert [rank.code for rank in outcomes[name]] == [0, 0], outcomes[name][0].stderr[-3000:]
    assert (iteration_folder(root / "torch", 4) / "mp_rank_00" / "model_optim_rng.pt").is_file()
    whole = losses_of(root / "whole")
    assert losses_of(root / "torch run") == {3: whole[3], 4: whole[4]}
    assert sorted(losses_of(root / "from torch")) == [5]


def test_weights_that_a_checkpoint_lacks_are_one_line_on_every_rank(runs):
    for rank in runs[1]["richer"]:
        assert rank.code == 2, rank.stderr[-3000:]
        (line,) = [x for x in rank.stderr.splitlines() if x.startswith("pretrain_gpt.py: error: ")]
        assert (
            "not in the checkpoint: decoder.layers.self_attention.k_layernorm.weight [2, 16]"
            in line
        )
        assert "output_layer.weight [512, 64]" in line
        assert "Traceback" not in rank.stderr


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_one_line_that_names_the_folder(runs, name: str):
    root, outcomes = runs
    words = REFUSED[name][1]
    if name == "damage" and not (root / "broken/iter_0000002/common.pt").exists():
        words = "common_state is damaged"  # a file of tensors holds it from Megatron-Core 0.19 on
    for rank in outcomes[name]:
        assert rank.code == 2, rank.stderr[-3000:]
        (line,) = [x for x in rank.stderr.splitlines() if x.startswith("pretrain_gpt.py: error: ")]
        assert "iter_0000002" in line
        assert words in line
        assert "Traceback" not in rank.stderr


@pytest.mark.parametrize("name", OTHER)
def test_the_advice_on_another_schedule_works(runs, name: str):
    ranks = runs[1][f"override {name}"]
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr[-3000:]


def test_a_manifest_that_lost_its_entries_is_damaged(tmp_path: Path):
    from megatron_cp.training.checkpoint.files import read_manifest

    (tmp_path / MANIFEST).write_text(json.dumps({"files": {}}))
    with pytest.raises(ValueError, match="damaged"):
        read_manifest(tmp_path)
