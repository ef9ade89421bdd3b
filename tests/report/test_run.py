import json

import pytest

from megatron_cp.report.run.record import config_of, read_run
from tests.report.runs import CONFIG, write_run


@pytest.fixture
def run_dir(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


def change(path, edit):
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def test_run_reads_back_what_was_logged(run_dir):
    run = read_run(run_dir)
    steps, losses = run.column("lm loss")
    assert steps == list(range(1, 21)) and losses == pytest.approx([9 - 0.1 * s for s in steps])
    assert run.column("lm loss validation") == ([10.0, 20.0], pytest.approx([8.5, 7.5]))
    assert run.name == "a run" and run.packs[0].mask.area() == run.packs[0].ours.area.sum()


def test_settings_of_the_planner_follow_from_the_arguments(run_dir):
    assert config_of(read_run(run_dir)) == CONFIG


def test_null_and_unfinished_lines_of_a_killed_run_are_left_out(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 21, "lm loss": null}\n{"iteration": 22, "lm lo')
    steps, _ = read_run(run_dir).column("lm loss")
    assert steps[-1] == 20


def test_run_without_packs_is_read(run_dir):
    (run_dir / "plan.json").unlink()
    assert read_run(run_dir).packs == ()


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_missing_file_is_named_in_one_line(run_dir, name):
    (run_dir / name).unlink()
    with pytest.raises(ValueError, match=f"{name} does not exist") as caught:
        read_run(run_dir)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["run.json", "plan.json"])
@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "{}", '{"schema": 99}', "[" * 100_000, '{"schema": 1, "x": NaN'],
)  # fmt: skip
def test_damaged_file_is_named_in_one_line(run_dir, name, content):
    (run_dir / name).write_text(content)
    with pytest.raises(ValueError, match=name) as caught:
        read_run(run_dir)
    assert "\n" not in str(caught.value)


EDITS = {
    "no samples": lambda record: record.pop("samples"),
    "samples of another kind": lambda record: record.update(samples=[3]),
    "no mask": lambda record: record["samples"][0].pop("mask"),
    "mask outside the pack": lambda record: record["samples"][0]["mask"][0].__setitem__(1, 10**6),
    "mask of half rows": lambda record: record["samples"][0].update(mask=[[1, 2, 3]]),
    "overlapping mask": lambda record: record["samples"][0]["mask"].append(
        record["samples"][0]["mask"][0]
    ),
    "another area": lambda record: record["samples"][0].update(mask_area=1),
    "no plan": lambda record: record["samples"][0]["plans"].pop("ours"),
    "a token twice": lambda record: record["samples"][0]["plans"]["ours"]["token_runs"][0].append(
        [0, 1]
    ),
    "a huge run": lambda record: record["samples"][0]["plans"]["ours"]["token_runs"].__setitem__(
        0, [[0, 1 << 60]]
    ),
    "a rank too few": lambda record: record["samples"][0]["plans"]["ours"]["token_runs"].pop(),
    "areas of too many ranks": lambda record: record["samples"][0]["plans"]["ours"].update(
        area_per_rank=[1] * 9
    ),
    "words for bytes": lambda record: record["samples"][0]["plans"]["ours"].update(
        comm_bytes={"forward": "<b>", "backward": []}
    ),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_wrong_record_of_plans_is_one_line_that_names_the_file(run_dir, edit):
    change(run_dir / "plan.json", edit)
    with pytest.raises(ValueError, match=r"plan\.json") as caught:
        read_run(run_dir)
    assert "\n" not in str(caught.value)


def test_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist; give what --run-dir named"):
        read_run(tmp_path / "nothing")
