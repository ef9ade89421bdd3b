"""run.json, metrics.jsonl and plan.json: what they say, and that they survive a killed run."""

import contextlib
import io
import itertools
import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.plan import make_plan
from megatron_cp.training.logging.records import RunFiles, _runs, plan_sample
from tests.ranks import run_on_ranks


def rows_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_are_appended_and_what_is_not_finite_is_null(tmp_path):
    command = ["pretrain_gpt.py", "--lr=1.0", "--window-size", "8,0", "--password=hunter2"]
    told = {"iteration": 0, "arguments": {"api_key": "x", "lr": 1.0}, "command": command}
    files = RunFiles(tmp_path, told)
    files.log({"iteration": 1, "lm loss": float("nan"), "grad-norm": 2.0})
    row = rows_of(tmp_path)[0]
    assert (row["iteration"], row["lm loss"], row["grad-norm"]) == (1, None, 2.0)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["arguments"] == {"lr": 1.0}
    assert run["command"] == [*command[:-1], "--password=<removed>"]
    assert run["finished"] is None
    files.finish({"iteration": 1})
    assert json.loads((tmp_path / "run.json").read_text())["finished"]["iteration"] == 1


def test_a_resumed_run_replaces_the_rows_after_its_checkpoint(tmp_path):
    files = RunFiles(tmp_path, {"iteration": 0, "arguments": {}})
    for iteration in range(1, 6):
        files.log({"iteration": iteration, "lm loss": float(iteration)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "lm l')  # killed while it wrote
    resumed = RunFiles(tmp_path, {"iteration": 3, "arguments": {}})
    resumed.log({"iteration": 4, "lm loss": 40.0})
    assert [(r["iteration"], r["lm loss"]) for r in rows_of(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]


def test_a_resumed_run_keeps_the_first_four_packs_once(tmp_path):
    """Packs of steps that the run left come again, those of another layout are not its own."""

    def kept_after(iteration, layout, packs):
        files = RunFiles(tmp_path, {"iteration": iteration, "arguments": {}, "layout": layout})
        for one in packs[: files.num_wanted_plan_samples]:
            files.add_plan_sample(one)
        return json.loads((tmp_path / "plan.json").read_text())["samples"]

    def packs(first, name):
        return [{"iteration": first + step, "by": name} for step in range(8)]

    assert kept_after(0, {"context": 1}, packs(1, "a")[:3]) == packs(1, "a")[:3]
    expected = packs(1, "a")[:2] + packs(3, "b")[:2]
    assert kept_after(2, {"context": 1}, packs(3, "b")) == expected
    assert kept_after(5, {"context": 1}, packs(6, "c")) == expected
    assert kept_after(5, {"context": 2}, packs(6, "d")) == packs(6, "d")[:4]


def test_a_finished_run_that_is_started_again_writes_no_row_twice(tmp_path):
    evaluated = {"iteration": 3, "lm loss validation": 2.0}
    written = {"iteration": 3, "document": 0, "continuation": "so"}
    for start, row in (
        (2, evaluated),
        (3, evaluated),
        (3, {**evaluated, "lm loss validation": 1.0}),
    ):
        files = RunFiles(tmp_path, {"iteration": start, "arguments": {}})
        files.log(row)
        files.add_texts([written])
    assert [row["lm loss validation"] for row in rows_of(tmp_path)] == [2.0, 1.0]
    assert json.loads((tmp_path / "text_samples.jsonl").read_text()) == written


def test_a_new_run_in_an_old_folder_keeps_the_old_records_aside(tmp_path, capsys):
    for number in range(3):
        files = RunFiles(tmp_path, {"iteration": 0, "arguments": {"lr": float(number)}})
        files.log({"iteration": 1, "lm loss": float(number)})
        files.add_texts([{"text": str(number)}])
    for number, folder in enumerate((tmp_path / "earlier-1", tmp_path / "earlier-2", tmp_path)):
        assert [row["lm loss"] for row in rows_of(folder)] == [number]
        assert json.loads((folder / "run.json").read_text())["arguments"] == {"lr": number}
        assert json.loads((folder / "text_samples.jsonl").read_text()) == {"text": str(number)}
    assert f"they are in {tmp_path / 'earlier-2'}" in capsys.readouterr().out


def begin_again_on_the_last_rank(rank, world_size, folder):
    """What each rank prints where the last one, which keeps the records, finds those of an earlier run."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        if rank == world_size - 1:
            RunFiles(Path(folder), {"iteration": 0, "arguments": {}}).log({"iteration": 1})
            RunFiles(Path(folder), {"iteration": 0, "arguments": {}})
    return said.getvalue()


def test_the_rank_that_keeps_the_records_says_where_the_old_ones_are(tmp_path):
    first, last = run_on_ranks(2, begin_again_on_the_last_rank, str(tmp_path))
    assert not first
    assert f"they are in {tmp_path / 'earlier-1'}" in last


@given(st.permutations(range(12)))
def test_runs_say_the_local_order_of_tokens(ids):
    runs = _runs(np.array(ids))
    assert [i for start, stop in runs for i in range(start, stop)] == list(ids)
    assert all(a[1] != b[0] for a, b in itertools.pairwise(runs))


def test_a_plan_sample_agrees_with_a_count_on_the_dense_mask():
    lengths = (40, 3, 61, 24)
    mask = masks.documents(list(lengths), within="causal")
    config = CPConfig(num_heads=4, num_kv_heads=2, head_dim=8, topology="cpu", element_bytes=4)
    plan = make_plan(mask, 2, config)
    sample = json.loads(json.dumps(plan_sample(7, mask, plan, lengths, ("causal",) * 4)))
    dense = mask.to_dense()
    assert sample["iteration"] == 7
    assert sample["mask_area"] == dense.sum()
    assert sample["document_lengths"] == list(lengths)
    for record in sample["plans"].values():
        assert sum(record["area_per_rank"]) == dense.sum()
        tokens = sorted(i for runs in record["token_runs"] for a, b in runs for i in range(a, b))
        assert tokens == list(range(len(tokens)))
        assert len(tokens) >= 128
        traffic = np.array(record["comm_bytes"]["forward"])
        assert traffic.shape == (2, 2)
        assert (np.diag(traffic) == 0).all()
    own = [
        np.concatenate([np.arange(a, b) for a, b in runs])
        for runs in sample["plans"]["ours"]["token_runs"]
    ]
    # Rows of keys and values that a rank needs and does not hold, if queries stay where they are.
    needed = [
        int(dense[np.ix_(own[r][own[r] < 128], own[1 - r][own[1 - r] < 128])].any(axis=0).sum())
        for r in (0, 1)
    ]
    row_bytes = 2 * 2 * 8 * 4  # keys and values of 2 heads of 8 fp32 numbers
    arrived = np.array(sample["plans"]["ours"]["comm_bytes"]["forward"]).sum(axis=0)
    assert arrived.tolist() == [count * row_bytes for count in needed]
