"""The launch examples: their flags are accepted, and two nodes restart after a killed rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_cp.training.arguments import judge_arguments
from megatron_cp.training.checkpoint.files import TRACKER
from tests.processes import HANG_SECONDS
from tests.training.commands import DATA, MODEL, ROOT, environment, train

LAUNCH = ROOT / "examples" / "launch"
GIVEN = {"RUN_DIR": "/shared/run", "DATA": "/shared/corpus", "TOKENIZER": "/shared/tokenizer.json"}


def words_of_torchrun(folder: Path, command: str) -> list[str]:
    """What a command gives to torchrun, which a stand-in on the PATH writes down."""
    (folder / "torchrun").write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {folder}/words\ntrap > {folder}/traps\n"
    )
    (folder / "torchrun").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", command], env={**os.environ, "PATH": path}, cwd=ROOT, check=True)
    return (folder / "words").read_text().splitlines()


def test_the_command_that_a_node_names_starts_it_and_every_flag_is_accepted(tmp_path: Path):
    lines = (LAUNCH / "node.sh").read_text().splitlines()
    command = "\n".join(line[1:] for line in lines if line.startswith("#   "))
    words = words_of_torchrun(tmp_path, command.replace("[more flags]", ""))
    place = words.index("pretrain_gpt.py")
    assert words[:4] == ["--nnodes", "2", "--nproc-per-node", "8"]
    _, reasons = judge_arguments(words[place + 1 :], {"WORLD_SIZE": "16", "RANK": "3"})
    assert reasons == []


def test_a_node_needs_its_folder():
    done = subprocess.run(
        ["bash", str(LAUNCH / "node.sh")], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )  # fmt: skip
    assert done.returncode != 0
    assert "RUN_DIR" in done.stderr


# Stand-ins of SLURM's commands; srun runs the node's script here, scancel signals it.
_STAND_INS = {
    "scontrol": 'echo "$@" >> calls; [ "$1" = show ] && echo first-node; true',
    "scancel": 'echo scancel "$@" >> calls; touch signalled',
    "srun": "echo srun >> calls; kill -USR1 $PPID; while [ ! -e signalled ]; do sleep 0.02; done; exit $CODE",
}


@pytest.mark.parametrize(("code", "is_queued_again"), [(0, True), (1, False)])
def test_a_slurm_job_out_of_time_is_queued_again_if_its_ranks_left_in_order(
    tmp_path: Path, code: int, is_queued_again: bool
):
    for name, text in _STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "CODE": str(code)
    }  # fmt: skip
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sh")], env={**os.environ, **variables, "PATH": path},
        cwd=tmp_path, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == code
    calls = (tmp_path / "calls").read_text()
    assert "scancel --signal=USR1 7\n" in calls
    assert ("requeue 7\n" in calls) == is_queued_again


def test_the_kubernetes_job_runs_the_node_script():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert "examples/launch/node.sh" in container["args"][0]
    names = {entry["name"] for entry in container["env"]}
    assert GIVEN.keys() <= names
    assert {"name": "NNODES", "value": str(worker["replicas"])} in container["env"]


# A rank that kills itself in step 4 of its first life.
_MORTAL = """
import os, sys
sys.path.insert(0, {root!r})
from megatron_cp.mcore import cpu
from megatron_cp.mcore.versions import compat
compat.silence_known_warnings(); cpu.install()
from tests.faults.program import Kill, _arm
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    _arm(Kill(1, "megatron_cp.training.bad_steps.check", "StepCheck.compute", 4))
from pretrain_gpt import main
main()
"""
RUN = (
    *MODEL, *DATA, "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "6",
    "--lr", "1e-3", "--log-interval", "1", "--eval-iters", "0", "--no-wandb", "--hidden-dropout", "0.1",
    "--context-parallel-size", "2", "--save-interval", "2",
)  # fmt: skip


def run_on_two_nodes(folder: Path, program: Path, *flags: str) -> list[str]:
    """What two torchrun agents printed, met at a store that this process serves; both must succeed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", folder.name,
        "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-conf", "is_host=0",
        "--local-addr", "127.0.0.1", str(program), *flags,
    ]  # fmt: skip
    variables = {
        **environment(str(folder)),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # as node.sh
    run = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": variables}
    nodes = [subprocess.Popen(torchrun, **run) for _ in range(2)]
    said = [node.communicate(timeout=HANG_SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said[0][-4000:] + said[1][-4000:]
    return said


@pytest.mark.timeout(1800)
def test_two_nodes_go_on_bitwise_after_a_killed_rank(tmp_path: Path):
    program = tmp_path / "mortal.py"
    program.write_text(_MORTAL.format(root=str(ROOT)))
    folders = {name: str(tmp_path / name) for name in ("whole", "killed")}
    said = train(2, *RUN, "--save", folders["whole"], "--load", folders["whole"])
    assert "successfully loaded checkpoint" not in said
    flags = (*RUN, "--save", folders["killed"], "--load", folders["killed"])
    said = "".join(run_on_two_nodes(tmp_path, program, *flags))
    assert "successfully loaded checkpoint" in said, "nobody was killed, or nobody restarted"
    losses = {}
    for name in folders:
        assert (tmp_path / name / TRACKER).read_text() == "6"
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        losses[name] = {
            r["iteration"]: (r["lm loss"], r["grad-norm"]) for r in rows if "lm loss" in r
        }
    assert losses["killed"] == losses["whole"]
    assert sorted(losses["whole"]) == [1, 2, 3, 4, 5, 6]
