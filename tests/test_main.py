import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_cp import doctor
from megatron_cp.__main__ import build_parser, main
from megatron_cp.data import IndexedWriter
from megatron_cp.kernels import loading
from megatron_cp.mask import documents, sliding_window
from megatron_cp.plan import PLANNERS
from tests.processes import HANG_SECONDS
from tests.report.runs import write_run

SMALL = ["--context-parallel-size", "2", "--num-attention-heads", "4", "--kv-channels", "16"]
EVERY = [
    *SMALL,
    "--cp-planner",
    ",".join(["zigzag", *(name for name in PLANNERS if name != "zigzag")]),
]
QUICK = [*SMALL, "--cp-planner", "zigzag,ring"]


@pytest.fixture
def corpus(tmp_path):
    prefix = tmp_path / "corpus"
    with IndexedWriter(prefix, dtype=np.dtype(np.uint16)) as writer:
        for length in (700, 3, 45, 1200, 88, 301, 2, 999):
            writer.add_document(np.arange(length) % 500)
        writer.finish()
    return str(prefix)


def refusal(capsys, *words):
    """What a refused command prints: exactly one line, on standard error, with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    printed = capsys.readouterr()
    assert caught.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("python -m megatron_cp")
    return printed.err


# ---------------------------------------------------------------------- plan


def test_plan_of_lengths_prints_the_area_of_their_mask_and_every_planner(capsys):
    assert main(["plan", "--lengths", "137,2041,89", *EVERY]) == 0
    printed = capsys.readouterr().out
    area = sum(n * (n + 1) // 2 for n in (137, 2041, 89))
    assert f"mask: {area:,} pairs" in printed and "predicted" in printed
    for planner in ("auto", "contiguous", "ring", "zigzag", "allgather", "ulysses"):
        assert f" {planner} " in printed
    assert "\n* zigzag" in printed


def test_plan_of_a_window_cuts_the_mask(capsys):
    assert main(["plan", "--lengths", "300,212", "--window-size", "64,0", *QUICK]) == 0
    area = (documents([300, 212]) & sliding_window(512, 64)).area()
    assert f"mask: {area:,} pairs" in capsys.readouterr().out


def test_plan_of_token_files_draws_full_packs_of_documents(capsys, corpus):
    assert main(["plan", "--data-path", corpus, "--seq-length", "512", "--split", "1", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "pack 1:" in printed and "512 tokens on 2 ranks, 256 rows each" in printed


def test_plan_of_one_causal_mask_writes_its_page(capsys, tmp_path):
    page = tmp_path / "plan.html"
    words = ["plan", "--mask", "causal", "--seq-length", "1000", *QUICK, "--html", str(page)]
    assert main(words) == 0
    assert f"mask: {1000 * 1001 // 2:,} pairs" in capsys.readouterr().out
    assert "megatron-cp plan --mask causal" in page.read_text()


def test_planner_that_cannot_serve_is_listed_with_its_reason(capsys):
    words = ["plan", "--lengths", "64", "--num-attention-heads", "3", "--kv-channels", "16"]
    assert main([*words, "--context-parallel-size", "2", "--cp-planner", "ring,ulysses"]) == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row[2:].startswith("ulysses")]
    assert "heads" in line


REFUSED = {
    "a mask without a name": ["plan", "--mask", "from_dense"],
    "more ranks than tokens": ["plan", "--lengths", "3", "--context-parallel-size", "4"],
    "no lengths": ["plan", "--lengths", ""],
    "two sources": ["plan", "--lengths", "3", "--data-path", "x"],
    "a negative length": ["plan", "--lengths=-1,4"],
    "no token": ["plan", "--lengths", "0,0"],
    "no rank": ["plan", "--lengths", "8", "--context-parallel-size", "0"],
    "half a window": ["plan", "--lengths", "8", "--window-size", "4"],
    "heads that do not divide": ["plan", "--lengths", "8", "--num-query-groups", "5"],
    "tensor parallel too wide": ["plan", "--lengths", "8", "--tensor-model-parallel-size", "5"],
    "an unknown planner": ["plan", "--lengths", "8", "--cp-planner", "best"],
    "missing files": ["plan", "--data-path", "/nowhere/x", "--seq-length", "8"],
    "files without a size": ["plan", "--data-path", "/nowhere/x"],
    "a file of lengths that is not there": ["plan", "--lengths", "a,b"],
    "an abbreviation": ["plan", "--len", "8"],
    "no command": [],
    "a command that is not there": ["emulate-all"],
    "a run that is not there": ["report", "/nowhere"],
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_one_line_and_exit_code_2(capsys, words):
    refusal(capsys, *words)


NEVER_MEANT = {  # flags, what the line must say
    "a length beyond int64": (["--lengths", "9" * 23], ["--lengths", "to 2147483648"]),
    "a total of terabytes": (["--lengths", "9999999999999"], ["--lengths", "to 2147483648"]),
    "a sum beyond the limit": (["--lengths", "2147483648,1"], ["at most 2147483648 tokens in all"]),
    "more digits than int reads": (["--lengths", "9" * 5000], ["--lengths", "to 2147483648"]),
    "a long pack": (["--mask", "causal", "--seq-length", "9" * 23], ["--seq-length", "at most 2147483648"]),
    "a wide window": (["--lengths", "8", "--window-size", f"{10**20},0"], ["--window-size"]),
    "many ranks": (["--lengths", "8", "--context-parallel-size", "8193"], ["at most 8192"]),
    "a wide head": (["--lengths", "8", "--kv-channels", "9" * 30], ["--kv-channels", "at most"]),
    "split of lengths": (["--lengths", "8", "--split", "0,0,0"], ["--split 0,0,0 is for --data-path"]),
    "a seed below zero": (["--lengths", "8", "--seed=-1"], ["--seed", "at least 0"]),
    "packing of a mask": (
        ["--mask", "causal", "--seq-length", "8", "--packing", "keep"],
        ["--packing keep is for --data-path"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NEVER_MEANT))
def test_what_cannot_be_meant_is_refused_by_name_and_limit(capsys, name):
    words, fragments = NEVER_MEANT[name]
    said = refusal(capsys, "plan", *words)
    assert len(said) < 400
    for fragment in fragments:
        assert fragment in said


def test_out_of_memory_is_one_line(capsys, monkeypatch):
    def allocate(*_, **__):
        raise MemoryError("Unable to allocate 72.8 TiB")

    monkeypatch.setattr("megatron_cp.report.dry_run.study.plan_corpus", allocate)
    said = refusal(capsys, "plan", "--lengths", "64", *QUICK)
    assert "out of memory (Unable to allocate 72.8 TiB); plan fewer tokens" in said


def test_damaged_index_is_named_in_the_line(capsys, corpus):
    os.truncate(f"{corpus}.idx", 40)
    assert f"{corpus}.idx" in refusal(capsys, "plan", "--data-path", corpus, "--seq-length", "64")


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--data-path", "https://user:hunter2@host/x?sig=abc", *QUICK],
        ["plan", "--lengths", "https://user:hunter2@host/x?sig=abc", *QUICK],
        ["plan", "--seq-length", "https://user:hunter2@host/x?sig=abc", *QUICK],
        ["report", "https://user:hunter2@host/x?sig=abc"],
        ["plan", "https://user:hunter2@host/x?sig=abc"],
        ["https://user:hunter2@host/x?sig=abc"],
    ],
    ids=str,
)
def test_a_refusal_does_not_say_the_password_of_a_url(capsys, words):
    line = refusal(capsys, *words)
    assert "hunter2" not in line and "sig=" not in line and "<removed>" in line


def test_page_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--lengths", "64", *QUICK, "--html", str(tmp_path / "file" / "page.html")])
    *progress, last = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and "error: /" in last and "file: File exists" in last
    assert "error" not in "".join(progress)


# ---------------------------------------------------------------------- report


def test_report_writes_where_it_is_told_and_says_so(capsys, tmp_path):
    write_run(tmp_path / "run", cp_size=2)
    write_run(tmp_path / "other", name="other", cp_size=1)
    target = tmp_path / "deep" / "page.html"
    words = ["report", str(tmp_path / "run"), "--output", str(target)]
    assert main([*words, "--compare", str(tmp_path / "other")]) == 0
    assert f"wrote {target}" in capsys.readouterr().out
    assert "Loss of two runs" in target.read_text()


def test_a_run_is_not_compared_with_itself(capsys, tmp_path):
    write_run(tmp_path / "run", cp_size=2)
    same = str(tmp_path / "deep" / ".." / "run")
    said = refusal(capsys, "report", str(tmp_path / "run"), "--compare", same)
    assert "is the run itself; give the folder of another" in said


def test_report_of_a_damaged_run_is_one_line(capsys, tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_text(json.dumps({"schema": 1, "samples": [{}]}))
    assert "plan.json" in refusal(capsys, "report", str(tmp_path / "run"))


def test_module_runs_as_a_program_and_survives_a_closed_pipe():
    words = [sys.executable, "-m", "megatron_cp", "plan", "--lengths", "64", *QUICK]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=HANG_SECONDS
    )
    os.close(writer)
    assert done.returncode == 141  # as of a program that SIGPIPE ends
    assert all(line.startswith("plan: planner ") for line in done.stderr.splitlines())


# ---------------------------------------------------------------------- doctor


@pytest.fixture
def probes(monkeypatch):
    """Answers of the probes by a word of their code; all work, there is no GPU."""
    answers = {"get_device_name": (True, "||"), "mcore": (True, ""), "gloo": (True, "")}

    def answer(code):
        return next(value for word, value in answers.items() if word in code)

    monkeypatch.setattr(doctor, "run_probe", answer)
    return answers


def test_doctor_says_that_training_can_run(capsys, probes, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "planted-secret-0123456789")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("training can run\n") and "planted-secret" not in printed
    assert "online: a key was found" in printed and f"{np.__version__}" in printed


@pytest.mark.parametrize("broken", ["mcore", "gloo"])
def test_doctor_says_what_keeps_training_from_running(capsys, probes, broken):
    probes[broken] = (False, "ImportError: something is missing")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    name = {"mcore": "Megatron-Core", "gloo": "gloo"}[broken]
    assert f"training cannot run: {name}\n" in printed and "something is missing" in printed


def test_doctor_tries_nccl_where_there_is_a_gpu(capsys, probes):
    probes["get_device_name"] = (True, "NVIDIA H200 sm_90|NCCL|13.0")
    probes["nccl"] = (False, "ncclSystemError")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "NVIDIA H200" in printed and "training cannot run: NCCL" in printed


@pytest.mark.parametrize(
    ("gpu", "chosen", "tried"),
    [
        ("NVIDIA H100 sm_90", "cuda:0: hopper", True),
        ("NVIDIA H100 sm_90", "cuda:0: flash (hopper failed its self-test)", True),
        ("NVIDIA A100 sm_80", "cuda:0: flash (of compute capability 8.0, only 9.0)", False),
    ],
)
def test_doctor_says_which_backend_computes_and_tries_the_kernels_where_they_could(
    capsys, probes, monkeypatch, gpu, chosen, tried
):
    driver = SimpleNamespace(part="CUDA driver", is_fine=True, words="13.0")
    monkeypatch.setattr(loading, "answers", lambda: [driver])
    probes["get_device_name"] = (True, f"{gpu}|NCCL|13.0")
    probes["nccl"] = (True, "")
    probes["tell_choice"] = (True, chosen)
    probes["load_variant"] = (True, "")
    probes["tell_all"] = (True, "GPU 0: all 28 kinds agree")
    main(["doctor"])
    printed = capsys.readouterr().out
    assert re.search(rf"attention +{re.escape(chosen)}\n", printed)
    assert ("one was loaded" in printed) == ("all 28 kinds" in printed) == tried


def test_probe_tells_the_last_line_of_a_failure_and_of_a_success():
    assert doctor.run_probe("raise SystemExit('no luck')") == (False, "no luck")
    assert doctor.run_probe("print(1); print(6 * 7)") == (True, "42")


def test_probes_of_collectives_work_here():
    assert doctor.run_probe(doctor.COLLECTIVE_PROBE.format(backend="gloo", device="cpu"))[0]


def test_cache_that_others_can_change_is_noted(tmp_path):
    folder = tmp_path / "megatron_cp"
    folder.mkdir()
    folder.chmod(0o777)
    assert doctor._cache({"XDG_CACHE_HOME": str(tmp_path)}).state == "note"
    folder.chmod(0o700)
    assert doctor._cache({"XDG_CACHE_HOME": str(tmp_path)}).state == "ok"


def test_every_command_of_the_parser_is_real():
    commands = build_parser("")._subparsers._group_actions[0].choices
    assert sorted(commands) == ["doctor", "emulate", "measure", "plan", "report", "simulate"]
