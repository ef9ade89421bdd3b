"""Where a run can go on, as its page says: every checkpoint that is there, and what is wrong with a damaged one."""

import json

from megatron_cp.report.run.page import run_page, write_run_report
from megatron_cp.report.run.record import read_run
from megatron_cp.training.checkpoint import files
from tests.report.runs import write_run


def checkpoint(root, step, num_bytes):
    folder = files.iteration_folder(root, step)
    folder.mkdir(parents=True)
    (folder / "weights.distcp").write_bytes(bytes(num_bytes))
    files.write_manifest(folder, {"shape": {}, "data": {}, "restarts": 0})
    return folder


def run_that_saved(folder, root):
    write_run(folder, cp_size=2)
    path = folder / "run.json"
    record = json.loads(path.read_text())
    record["arguments"]["save"] = str(root)
    path.write_text(json.dumps(record))
    return folder


def test_checkpoints_are_listed_newest_first_with_their_losses_and_flags(tmp_path):
    root = tmp_path / "saved & kept"
    folder = run_that_saved(tmp_path / "run", root)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [int(row["iteration"]) for row in rows if "lm loss" in row][-2:]
    for step in steps:
        checkpoint(root, step, 3_000_000)
    (checkpoint(root, 999, 10) / "weights.distcp").write_bytes(b"short")
    text = write_run_report(folder).read_text(encoding="utf-8")
    shown = text[text.index("Resume points") :]
    newest, older = (shown.index(f"--ckpt-step {step}") for step in reversed(steps))
    assert shown.index(">999<") < newest < older
    assert "cannot be loaded" in shown and "must have 10 bytes" in shown
    for step in steps:
        loss = next(row["lm loss"] for row in rows if row["iteration"] == step)
        assert f"<td>{step}</td><td>{loss:.4f}</td>" in shown
    assert "3 MB" in shown and "saved &amp; kept" in shown


def test_a_run_without_checkpoints_has_no_such_section(tmp_path):
    folder = run_that_saved(tmp_path / "run", tmp_path / "nothing")
    assert "Resume points" not in run_page(read_run(folder))
    (tmp_path / "nothing").mkdir()
    assert "Resume points" not in run_page(read_run(folder))
