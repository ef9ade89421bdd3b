"""wandb offline and without questions, no secrets in what is written, and failures that stop nothing."""

import json
import struct
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
import wandb
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.report.run.media import run_media
from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.logging.spikes import GradientSpikes
from megatron_cp.training.logging.tracking import Tracker, start_tensorboard
from megatron_cp.training.logging.wandb_run import WandbRun, group_of, start_wandb, wandb_mode
from tests.report.runs import write_run
from tests.training.commands import RUN_WITH_WANDB

SECRET = "hunter2PLANTED"


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "x"}, "online"),
        ({"WANDB_MODE": "online"}, "offline"),  # online without a key would ask for one
        ({"WANDB_MODE": "online", "WANDB_API_KEY": "x"}, "online"),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": "x"}, "offline"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "x"}, "disabled"),
        ({"WANDB_MODE": "dryrun"}, "offline"),
        ({"WANDB_DISABLED": "true", "WANDB_API_KEY": "x"}, "disabled"),
    ],
    ids=str,
)
def test_wandb_is_online_only_where_it_would_not_ask(tmp_path, environment, mode):
    home = {"NETRC": str(tmp_path / "none"), "HOME": str(tmp_path)}
    assert wandb_mode({**home, **environment}) == mode


def test_a_login_in_netrc_counts_for_its_host_alone(tmp_path):
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    environment = {"NETRC": str(tmp_path / "netrc")}
    assert wandb_mode(environment) == "online"
    assert wandb_mode({**environment, "WANDB_BASE_URL": "https://other.example"}) == "offline"


def bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def records_of(log: Path) -> list:
    """The records of an offline run: protocol buffers in LevelDB's log format, blocks of 32 KiB.

    A piece is (checksum 4 bytes, length 2, kind 1: whole, first, middle, last) and its bytes; 7 bytes begin the file.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, pieces, records = log.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is empty
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            records.append(record)
            pieces = b""
    return records


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_offline_run_holds_its_name_tags_minima_alerts_pictures_and_tables(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_RUN_GROUP", "a group")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    write_run(tmp_path / "my run", cp_size=2)
    config = parse_arguments([*RUN_WITH_WANDB, "--run-dir", str(tmp_path / "my run")], {})
    folder = tmp_path / "my run" / "wandb"
    files = types.SimpleNamespace(log=lambda row: None, finish=lambda summary: None)
    run = start_wandb(config, folder, {"NETRC": str(tmp_path / "none")})
    tracker = Tracker(wandb_run=run, files=files)
    for iteration, loss in ((1, 3.0), (2, 1.5), (3, 2.0)):
        tracker.log(iteration, {"lm loss": loss})
    tracker.alert("loss is not finite", "step 4: lm loss nan")
    tracker.finish({}, lambda: run_media(tmp_path / "my run"))
    wandb.teardown()
    (log,) = tmp_path.rglob("*.wandb")
    assert log.relative_to(folder).parts[0].startswith("offline-run-")  # wandb/ once in the path
    assert log.name == f"run-{tracker.wandb_run_id}.wandb"
    records = records_of(log)
    (start,) = (one.run for one in records if one.WhichOneof("record_type") == "run")
    assert (start.display_name, start.run_group, start.job_type) == (
        "my run",
        "a group",
        "pretrain",
    )
    assert {"CP 1", "planner zigzag"} <= set(start.tags)
    assert start.host == ""
    minima = {one.metric.name for one in records if one.metric.summary.min}
    assert {"lm loss", "lm loss validation"} <= minima
    (alert,) = (one.alert for one in records if one.WhichOneof("record_type") == "alert")
    assert (alert.title, alert.text) == ("loss is not finite", "step 4: lm loss nan")
    history = [item for one in records for item in one.history.item]
    keys = {(*item.nested_key, item.key)[0] for item in history}
    shown = {"report/page", "report/mask", "report/dispatch", "report/planners"}
    assert {"lm loss", "report/document_lengths", *shown} <= keys
    page = max(folder.rglob("*.html"), key=lambda path: path.stat().st_size).read_text()
    assert page == run_media(tmp_path / "my run").pages["report/page"]
    (table,) = (json.loads(path.read_text()) for path in folder.rglob("planners*.table.json"))
    assert table["data"][0][0] == "auto"


@pytest.mark.parametrize(
    ("run_dir", "group"),
    [("runs/python-docs/cp2", "python-docs"), ("/data/sweep/a", "sweep"), ("alone", None), ("../a", None), (None, None),
     (f"hf_{SECRET}/a", None)],
)  # fmt: skip
def test_runs_in_folders_side_by_side_are_a_group(run_dir, group):
    config = parse_arguments([*RUN_WITH_WANDB, *(["--run-dir", run_dir] if run_dir else [])], {})
    assert group_of(config) == group


@pytest.mark.parametrize(
    ("run_dir", "group"),
    [("/cluster/people/alice/x", None), ("/cluster/people/x", None), ("/x", None), ("/tmp/x", None),
     ("/var/tmp/x", None), ("/scratch/alice/x", None),
     ("/cluster/people/alice/y/../x", None),
     ("/cluster/people/alice/sweep/x", "sweep"), ("/tmp/sweep/x", "sweep"),
     *((f"{homes}/bob/x", None) for homes in ("/home", "/Users")),
     *((f"{homes}/bob/sweep/x", "sweep") for homes in ("/home", "/Users"))],
)  # fmt: skip
def test_a_group_is_not_named_after_a_user_or_what_holds_all_users(monkeypatch, run_dir, group):
    monkeypatch.setenv("HOME", "/cluster/people/alice")
    config = parse_arguments([*RUN_WITH_WANDB, "--run-dir", run_dir], {})
    assert group_of(config) == group


def test_a_user_without_a_home_has_groups(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    config = parse_arguments([*RUN_WITH_WANDB, "--run-dir", "/data/sweep/x"], {})
    assert group_of(config) == "sweep"


def spikes_by_hand(norms, num_steps):
    """Steps whose norm is above five times the median of all before, as sorting says it."""
    found = []
    for step, norm in enumerate(norms, 1):
        before = sorted(one for one in norms[: step - 1] if np.isfinite(one))
        if len(before) >= 10 and step > num_steps // 10 and norm > 5 * before[len(before) // 2]:
            found.append(step)
    return found


@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.5, 4.0, 9.0, 60.0, float("nan")]), max_size=80),
    st.sampled_from([0, 80, 400]),
)
def test_gradient_norms_that_stand_out_are_told_as_counted_by_hand(norms, num_steps):
    told = []
    run = types.SimpleNamespace(
        log=lambda row, step: None, alert=lambda title, text, wait_duration: told.append(text)
    )
    tracker = Tracker(wandb_run=WandbRun(run, num_steps))
    for step, norm in enumerate(norms, 1):
        tracker.log(step, {"grad-norm": norm, "lm loss": 2.0})
    assert [int(words.split(":")[0].split()[1]) for words in told] == spikes_by_hand(
        norms, num_steps
    )
    assert all("times the median" in words for words in told)


def test_what_is_usual_is_of_the_last_thousand_steps():
    """A norm that has fallen a hundredfold: a spike at the end is small beside the beginning."""
    spikes = GradientSpikes(0)
    for step in range(1, 1600):
        assert spikes.told(step, {"grad-norm": 100.0 if step <= 500 else 1.0}) is None
    assert (
        spikes.told(1600, {"grad-norm": 6.0}) == "step 1600: gradient norm 6, 6 times the median 1"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_offline_run_holds_every_argument_and_metric_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path)
    )  # wandb leaves folders there, and logs here
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--api-key", SECRET])
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    config = parse_arguments([*RUN_WITH_WANDB, "--wandb-exp-name", "a-run-name"], {})
    config = config.with_arguments(api_key=SECRET, data_url=f"https://user:{SECRET}@host/x")
    run = start_wandb(config, tmp_path, {"NETRC": str(tmp_path / "none")})
    tracker = Tracker(wandb_run=run)
    for iteration in (1, 2):
        tracker.log(iteration, {"lm loss": 1.5 * iteration, "cp/area_max_over_mean": 1.01})
    tracker.finish({})
    wandb.teardown()  # what the end of the process does: waits until everything is written
    (log,) = tmp_path.rglob("*.wandb")
    written = log.read_bytes()
    assert b"lm loss" in written
    assert b"cp/area_max_over_mean" in written
    assert b"seq_length" in written
    assert SECRET.encode() not in bytes_of(tmp_path)


def test_a_wandb_that_fails_is_a_warning_of_one_line(tmp_path, monkeypatch, capsys):
    def broken(**keywords):
        raise OSError("read-only\nfile system")

    fake = types.SimpleNamespace(init=broken, Settings=lambda **keywords: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert start_wandb(parse_arguments(RUN_WITH_WANDB, {}), tmp_path, {}) is None
    assert capsys.readouterr().err == "WARNING: wandb is not used: read-only file system\n"


def test_a_missing_wandb_is_told_with_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert start_wandb(parse_arguments(RUN_WITH_WANDB, {}), tmp_path, {}) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("; pip install wandb, or give --no-wandb")


def test_a_wandb_that_dies_in_the_middle_leaves_the_other_sinks_alone(capsys):
    class Dying:
        def log(self, row, step):
            raise RuntimeError("gone")

    rows = []
    files = types.SimpleNamespace(log=rows.append, finish=rows.append)
    tracker = Tracker(wandb_run=WandbRun(Dying()), files=files)
    tracker.log(1, {"lm loss": 2.0})
    tracker.log(2, {"lm loss": 1.0})
    said = "WARNING: wandb stopped working and is left out from now on: gone\n"
    assert capsys.readouterr().err == said
    assert rows == [{"iteration": 1, "lm loss": 2.0}, {"iteration": 2, "lm loss": 1.0}]


def test_no_wandb_means_no_wandb(tmp_path):
    assert start_wandb(parse_arguments([*RUN_WITH_WANDB, "--no-wandb"], {}), tmp_path, {}) is None
    assert list(tmp_path.iterdir()) == []


class EventFiles:
    """What tensorboard shows of the points that writers sent to folders.

    A writer that begins with a step to purge hides points of that step and behind, of every curve of its folder.
    """

    def __init__(self):
        self.shown: dict[str, list[tuple[str, float, int]]] = {}

    def open(self, *, log_dir, purge_step, max_queue):
        points = self.shown.setdefault(log_dir, [])
        if purge_step is not None:
            points[:] = [point for point in points if point[2] < purge_step]
        add = lambda *point: points.append(point)  # noqa: E731
        nothing = lambda *given: None  # noqa: E731
        return types.SimpleNamespace(add_scalar=add, add_text=nothing, close=nothing)

    def curves(self) -> dict[str, dict[int, list[float]]]:
        found: dict[str, dict[int, list[float]]] = {}
        for key, value, step in (point for points in self.shown.values() for point in points):
            found.setdefault(key, {}).setdefault(step, []).append(value)
        return found


def _log_steps(folder, first: int, last: int, value: float, *flags: str) -> None:
    """A run of four packs a step that goes on behind the step before the first."""
    config = parse_arguments([*RUN_WITH_WANDB, "--tensorboard-dir", str(folder), *flags], {})
    tracker = Tracker(writer=start_tensorboard(config, first - 1, 4 * (first - 1)))
    for step in range(first, last + 1):
        tracker.log(step, {"lm loss": value}, samples=4 * step)
    tracker.finish({})


def test_a_run_that_goes_on_shows_each_step_once_in_tensorboard(tmp_path, monkeypatch):
    files = EventFiles()
    fake = types.SimpleNamespace(SummaryWriter=files.open)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    _log_steps(tmp_path, 1, 9, 2.0)
    _log_steps(tmp_path, 5, 8, 1.0)  # its checkpoint was of step 4
    values = {1: [2.0], 2: [2.0], 3: [2.0], 4: [2.0], 5: [1.0], 6: [1.0], 7: [1.0], 8: [1.0]}
    by_samples = {4 * step: value for step, value in values.items()}
    assert files.curves() == {"lm loss": values, "lm loss vs samples": by_samples}
    _log_steps(tmp_path, 3, 2, 1.0, "--skip-train")  # evaluates the checkpoint of step 2
    assert files.curves() == {"lm loss": values, "lm loss vs samples": by_samples}


def test_what_wandb_takes_no_second_time_is_told(capsys):
    before = types.SimpleNamespace(resumed=True, step=10)  # it waits for step 10
    WandbRun(before).tell_kept_steps(4)
    assert "wandb keeps its rows of steps 5 to 9, from before this start" in capsys.readouterr().out
    for run, iteration in (
        (before, 9),
        (types.SimpleNamespace(resumed=False, step=10), 4),
        (None, 4),
    ):
        WandbRun(run).tell_kept_steps(iteration)
    assert capsys.readouterr().out == ""


def test_a_missing_tensorboard_is_told_with_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    config = parse_arguments([*RUN_WITH_WANDB, "--tensorboard-dir", str(tmp_path)], {})
    assert start_tensorboard(config, 0, 0) is None
    said = "WARNING: --tensorboard-dir is not used: pip install tensorboard\n"
    assert capsys.readouterr().err == said
