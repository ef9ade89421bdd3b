"""Training, planning, reports and `doctor` reach for no other machine unless they are asked to."""

import json

import pytest
import tokenizers

from megatron_cp.data.indexed_writer import IndexedWriter
from tests.faults.offline import write_sitecustomize
from tests.faults.program import Launch, run_program
from tests.training.commands import MODEL, STEPS

pytestmark = pytest.mark.timeout(900)


def test_no_address_but_the_machine_s_own_is_looked_up_or_connected_to(tmp_path):
    words = {word: number for number, word in enumerate(["<unk>", "<eos>", "a", "b", "c"])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>")).save(
        str(tmp_path / "words.json")
    )
    with IndexedWriter(tmp_path / "corpus", dtype="uint16") as writer:
        for number in range(60):
            writer.add_document([2 + (number + place) % 3 for place in range(50)])
        writer.finish()
    folder, run = tmp_path / "own", tmp_path / "run"
    folder.mkdir()
    data = ("--data-path", str(tmp_path / "corpus"), "--seq-length", "128", "--num-workers", "1")
    text = (
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(tmp_path / "words.json"),
    )
    train = (*MODEL, *STEPS, *data, *text, "--context-parallel-size", "2", "--split", "8,1,1")
    train = (*train, "--eval-iters", "1", "--save", str(run))
    asked = "plan --lengths 137,204,89 --context-parallel-size 2 --cp-planner auto --html"
    first = {"COMMANDS": f"doctor\n{asked} {tmp_path}/plan.html"}
    variables = write_sitecustomize(folder)
    launches = [
        Launch((), plant="tests.faults.offline.ask", environment={**variables, **first}),
        Launch(train, 2, plant="tests.faults.offline.listen", environment=variables),
        Launch(
            (),
            plant="tests.faults.offline.ask",
            environment={**variables, "COMMANDS": f"report {run}"},
        ),
    ]
    for ranks in run_program(launches):
        assert {rank.code for rank in ranks} == {0}, (
            ranks[0].stdout[-2000:] + ranks[0].stderr[-3000:]
        )
    assert not (folder / "attempts").exists(), (folder / "attempts").read_text()
    assert json.loads((run / "run.json").read_text())["finished"]["iteration"] == 4
    assert len(list(run.rglob("offline-run-*/*.wandb"))) == 1
    assert (tmp_path / "plan.html").is_file() and list(run.glob("*.html"))


def test_an_attempt_of_any_process_is_seen(tmp_path):
    launch = Launch(
        (), plant="tests.faults.offline.reach_out", environment=write_sitecustomize(tmp_path)
    )
    ((rank,),) = run_program([launch])
    assert rank.code == 0, rank.stderr
    seen = (tmp_path / "attempts").read_text().splitlines()
    assert seen == ["socket.connect 192.0.2.1", "socket.getaddrinfo example.org"]
