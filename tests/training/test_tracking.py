"""wandb offline and without questions, no secrets in what is written, and failures that stop nothing."""

import sys
import tempfile
import types
from pathlib import Path

import pytest
import wandb

from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.logging.tracking import (
    Tracker,
    start_tensorboard,
    start_wandb,
    wandb_mode,
)
from tests.training.commands import SMALL_RUN

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_offline_run_holds_every_argument_and_metric_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path)
    )  # wandb leaves folders there, and logs here
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--api-key", SECRET])
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    config = parse_arguments([*SMALL_RUN, "--wandb-exp-name", "a-run-name"], {})
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


def test_a_wandb_that_fails_is_a_warning(tmp_path, monkeypatch):
    def broken(**keywords):
        raise OSError("read-only file system")

    fake = types.SimpleNamespace(init=broken, Settings=lambda **keywords: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.warns(UserWarning, match="read-only file system"):
        assert start_wandb(parse_arguments(SMALL_RUN, {}), tmp_path, {}) is None


def test_a_wandb_that_dies_in_the_middle_leaves_the_other_sinks_alone():
    class Dying:
        def log(self, row, step):
            raise RuntimeError("gone")

    rows = []
    files = types.SimpleNamespace(log=rows.append, finish=rows.append)
    tracker = Tracker(wandb_run=Dying(), files=files)
    with pytest.warns(UserWarning, match="gone"):
        tracker.log(1, {"lm loss": 2.0})
    tracker.log(2, {"lm loss": 1.0})
    assert rows == [{"iteration": 1, "lm loss": 2.0}, {"iteration": 2, "lm loss": 1.0}]


def test_no_wandb_means_no_wandb(tmp_path):
    assert start_wandb(parse_arguments([*SMALL_RUN, "--no-wandb"], {}), tmp_path, {}) is None
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_values_by_iteration_and_by_samples():
    points = []
    add = lambda *point: points.append(point)  # noqa: E731
    writer = types.SimpleNamespace(add_scalar=add, close=lambda: None)
    Tracker(writer=writer).log(3, {"lm loss": 2.0}, samples=12)
    assert points == [("lm loss", 2.0, 3), ("lm loss vs samples", 2.0, 12)]


def test_a_missing_tensorboard_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    config = parse_arguments([*SMALL_RUN, "--tensorboard-dir", str(tmp_path)], {})
    with pytest.warns(UserWarning, match="install tensorboard"):
        assert start_tensorboard(config) is None
