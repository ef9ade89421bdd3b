"""What all commands have in common: they begin at once, speak JSON, end quietly, and help."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cp import __version__, checkout, doctor
from megatron_cp.__main__ import COMMANDS, main
from megatron_cp.commands.arguments import lengths_or_path
from tests.processes import HANG_SECONDS

ROOT = Path(__file__).resolve().parent.parent
SLOW = "trying what is installed, some ten seconds"
SMALL = ["--context-parallel-size", "2", "--tokens-per-rank", "512", "--cp-planner", "zigzag,ring"]
PROBE = """
import sys
from megatron_cp.__main__ import main
try:
    main({words!r})
except SystemExit as end:
    code = end.code
print(code, sorted({{"numpy", "torch", "megatron"}} & set(sys.modules)))
"""


def after(*words):
    """Exit code and heavy modules in memory after a command that ends in its arguments."""
    probe = PROBE.format(words=list(words))
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    code, modules = done.stdout.splitlines()[-1].split(" ", 1)
    return int(code), json.loads(modules.replace("'", '"'))


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], [], ["plann"], ["doctor", "--no"], ["report"]]
)
def test_what_needs_no_numbers_imports_none(words):
    code, modules = after(*words)
    assert modules == [] and code == (0 if words in (["--version"], ["--help"]) else 2)


@pytest.mark.parametrize("command", ["plan", "simulate", "emulate"])
def test_bad_arguments_and_help_end_before_torch_is_imported(command):
    assert after(command, "--no-such-flag") == (2, ["numpy"])
    assert after(command, "--help") == (0, ["numpy"])


@pytest.mark.parametrize(
    "words",
    [
        ["emulate", "--kv-channels", "7"],
        ["emulate", "--v-head-dim", "300"],
        ["emulate", "--softcap", "-1"],
        ["emulate", "--seq-length", "1M"],
        ["emulate", "--mask", "round"],
        ["plan", "--mask", "round"],
        ["measure", "cluster.json"],
    ],
)
def test_an_error_is_found_before_torch_is_imported(words):
    assert after(*words) == (2, ["numpy"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a command is missing; give one of doctor, plan, simulate, "),
        (["plan", "--context-paralel-size", "4"], "4; nearest: --context-parallel-size"),
        (
            ["plan", "--mask=full", "--lenghts=4"],
            "unrecognized arguments: --lenghts=4; nearest: --le",
        ),
        (["report", "runs/a", "runs/b"], "unrecognized arguments: runs/b; see --help"),
        (["--foo", "plan", "--lengths", "3"], "unrecognized arguments: --foo; see --help"),
        (["--lenghts=4", "plan"], "unrecognized arguments: --lenghts=4; nearest: --lengths"),
        (["--lengths=4", "plan"], "--lengths=4; --lengths stands behind the command"),
        (["plan", "--lengths", "13,x"], "--lengths 13,x is neither document lengths, as 137,"),
    ],
)
def test_what_is_not_known_is_named_beside_what_is_near(capsys, words, said):
    with pytest.raises(SystemExit) as end:
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and said in line
    assert line.startswith(" ".join(["python -m megatron_cp", *words[:1]]) + ": error: ")


@pytest.mark.parametrize("words", [["plan", "--html"], ["simulate", "--trace"], ["plan", "--json"]])
def test_a_file_that_cannot_be_written_is_told_before_any_planner_runs(capsys, tmp_path, words):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        main([*words, str(tmp_path / "file" / "page"), *SMALL])
    printed = capsys.readouterr()
    assert end.value.code == 2 and printed.out == ""
    assert printed.err == (
        f"python -m megatron_cp {words[0]}: error: {tmp_path / 'file'}: File exists\n"
    )


@pytest.mark.parametrize("more", [[], ["--megatron", "checkout"]])
def test_doctor_looks_at_nothing_where_its_file_cannot_be_written(tmp_path, monkeypatch, more):
    for module, name in ((doctor, "examine"), (checkout, "examine_checkout")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it was examined"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        main(["doctor", *more, "--json", str(tmp_path / "file" / "found")])
    assert end.value.code == 2


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_key_heads_that_tensor_ranks_cannot_share_are_refused_and_never_assumed(capsys, command):
    words = [command, *SMALL, "--num-attention-heads", "24", "--tensor-model-parallel-size", "2"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--num-query-groups", "3"])
    said = "--num-query-groups 3 must divide, or be a multiple of, --tensor-model-parallel-size 2; "
    assert end.value.code == 2 and said in capsys.readouterr().err
    assert main(words) == 0  # an eighth would be 3
    assert "--num-query-groups 2," in capsys.readouterr().out


ISOLATED = """
import sys
sys.path[:] = [path for path in sys.path if "site-packages" not in path]
sys.path.insert(0, {root!r})
sys.argv = ["-m", *{words!r}]
sys.executable = {python!r}
from megatron_cp.__main__ import main
sys.exit(main())
"""


def without_packages(folder, *words):
    """What a command says in an interpreter that has the standard library and our source, nothing else.

    So has each that it starts: by a script in `folder`.
    """
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    program = ISOLATED.format(root=str(ROOT), words=list(words), python=str(python))
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_doctor_works_without_any_package_and_says_what_is_missing(tmp_path):
    done = without_packages(tmp_path, "doctor")
    assert done.returncode == 1 and done.stderr == f"doctor: {SLOW}\n"
    missing = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("NO")]
    assert {"megatron-core", "numpy", "torch", "Megatron-Core", "gloo"} <= set(missing)
    assert "is not installed: pip install torch" in done.stdout


@pytest.mark.parametrize("command", ["plan", "simulate", "report"])
def test_other_commands_say_in_one_line_that_a_package_is_missing(tmp_path, command):
    done = without_packages(tmp_path, command, "nowhere" if command == "report" else "--help")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "numpy is not installed" in line and "doctor says what is missing" in line


@pytest.mark.parametrize(
    ("line", "offered"), [("megatron-cp si", "simulate"), ("megatron-cp plan --mas", "--mask")]
)
def test_the_shell_completes_commands_and_flags(line, offered, tmp_path):
    pytest.importorskip("argcomplete")
    answer = tmp_path / "answer"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    command = [sys.executable, "-m", "megatron_cp"]
    subprocess.run(command, env=environment, cwd=ROOT, timeout=HANG_SECONDS, check=False)
    assert offered in answer.read_text()


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"megatron_cp {__version__}\n"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_names_every_default_and_ends_with_an_example(capsys, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    example = text.splitlines()[-1]
    started = "torchrun .*-m" if command == "measure" else "python -m"
    assert re.match(rf"example: {started} megatron_cp {command}\b", example)
    assert "default: ()" not in text
    for flag, default in {
        "--kv-channels": "128",
        "--seed": "1234",
        "--cp-topology": "h100",
    }.items():
        if f"  {flag} " in text:
            (line,) = re.findall(rf"^  {flag} .*(?:\n {{10,}}.*)*", text, flags=re.M)
            assert f"default: {default}" in line


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_json_without_a_file_is_all_that_stands_on_standard_output(capsys, command):
    assert main([command, *SMALL, "--json"]) == 0
    printed = capsys.readouterr()
    values = json.loads(printed.out)
    planners = (values["steps"][0] if command == "simulate" else values)["planners"]
    assert [one["planner"] for one in planners] == ["zigzag", "ring"]
    assert all(one["predicted_ms"] > 0 and "plan" not in one for one in planners)
    assert f"{command}: " in printed.err and "planner" in printed.err.splitlines()[0]


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_json_in_a_file_stands_beside_the_text_and_only_the_asked_planners_run(
    capsys, tmp_path, command
):
    target = tmp_path / "new" / "figures.json"
    assert main([command, *SMALL, "--json", str(target)]) == 0
    printed = capsys.readouterr()
    assert f"wrote {target}" in printed.err and json.loads(target.read_text())
    assert "* zigzag" in printed.out and "  ring " in printed.out and " magi " not in printed.out
    packs = "--packs 2, " if command == "plan" else ""
    line = f"by default: --workload W1, --mask documents, {packs}--num-attention-heads 64, "
    assert line in printed.out and "--cp-topology h100" in printed.out


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("mask", ["documents", "causal_document"])
def test_what_was_given_is_not_assumed_even_where_it_is_the_default(capsys, command, mask):
    given = ["--mask", mask, "--num-attention-heads=64", "--kv-channels", "128", "--lengths", "512"]
    assert main([command, *given, "--cp-planner", "zigzag", "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)["assumed"]
    cp_size = 8 if command == "plan" else "8,64,512"
    heads = {"--num-query-groups": 8, "--cp-topology": "h100"}
    assert assumed == {"--context-parallel-size": cp_size, **heads}


def test_a_step_of_replicas_says_what_it_assumes(capsys):
    words = ["--data-parallel-size", "2", "--cp-planner", "zigzag", "--tokens-per-rank", "64"]
    assert main(["simulate", *words]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "--mask documents, --context-parallel-size 8, --global-batch-size 2, " in line


@pytest.mark.parametrize("command", ["plan", "simulate", "emulate"])
def test_help_names_the_builders_of_masks(capsys, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    (line,) = re.findall(r"^  --mask NAME .*", capsys.readouterr().out, flags=re.M)
    for name in ("documents", "shared_question", "prefix_tree", "block_diffusion"):
        assert f" {name}," in line
    assert line.endswith("; default: documents")


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_ranks_of_different_speed_are_priced_and_named(capsys, command):
    """Full attention, zigzag on two ranks, one half as fast: its pairs take twice as long, the fair time is 4/3."""
    found, full = [], [*SMALL, "--mask", "full"]
    for more in ([], ["--cp-rank-speeds", "1,.5"]):
        assert main([command, *full, "--json", *more]) == 0
        values = json.loads(capsys.readouterr().out)
        planners = (values["steps"][0] if command == "simulate" else values)["planners"]
        found.append(planners[0])
    even, slow = found
    assert (even["imbalance"], slow["imbalance"]) == (pytest.approx(1.0), pytest.approx(1.5))
    assert even["predicted_ms"] < slow["predicted_ms"]
    assert main([command, *full, "--cp-rank-speeds", "1,.5"]) == 0
    assert "rank speeds 1, 0.5" in capsys.readouterr().out


def test_doctor_answers_in_json(capsys, monkeypatch):
    finding = doctor.Finding("Python", "fail", "3.9, need 3.10")
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "training": False,
        "findings": [{"name": "Python", "state": "fail", "text": "3.9, need 3.10"}],
    }


def test_one_mask_has_the_same_area_in_plan_and_simulate(capsys):
    words = [
        "--mask",
        "window_document",
        "--lengths",
        "2000,3,45",
        "--window-size",
        "100,0",
        "--seed",
        "3",
    ]
    sizes = ["--context-parallel-size", "2", "--cp-planner", "zigzag", "--json"]
    found = []
    for command in ("plan", "simulate"):
        assert main([command, *words, *sizes]) == 0
        values = json.loads(capsys.readouterr().out)
        found.append((values["packs"] if command == "plan" else values["steps"])[0])
    counted = sum(min(i + 1, 101) for n in (2000, 3, 45) for i in range(n))
    assert [(one["tokens"], one["pairs"]) for one in found] == [(2048, counted)] * 2


def test_an_interrupt_is_one_line_and_code_130():
    words = ["simulate", "--context-parallel-size", "64", "--tokens-per-rank", "16K"]
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_cp", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        assert process.stderr.readline().startswith("simulate: 64 ranks, planner 1 of ")
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130
    *progress, last = said.splitlines()
    assert last == "python -m megatron_cp simulate: interrupted"
    assert all(line.startswith("simulate: ") for line in progress)


STARTED = """
import runpy, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron_cp.command_line":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
runpy.run_module("megatron_cp", run_name="__main__")
"""


def test_an_interrupt_of_the_first_imports_is_one_line_and_code_130():
    done = subprocess.run(
        [sys.executable, "-c", STARTED],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "megatron_cp: interrupted\n")


def test_lengths_are_numbers_or_a_path(tmp_path):
    assert lengths_or_path("137,2041,89") == [137, 2041, 89]
    assert lengths_or_path(str(tmp_path)) == tmp_path


def test_a_step_of_one_replica_may_have_ranks_of_different_speed(capsys):
    words = ["--data-parallel-size", "1", "--context-parallel-size", "2", "--seq-length", "4096"]
    assert main(["simulate", *words, "--cp-rank-speeds", "1,.5"]) == 0
    assert "rank speeds 1, 0.5" in capsys.readouterr().out
