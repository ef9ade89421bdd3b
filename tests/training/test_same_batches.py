"""Ranks that share batches but hold other tokens or plans stop together, and the odd ones are named."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_cp.data.batch import BatchConfig, PlanRequest, build_batch, plan_batch
from megatron_cp.data.document_set import open_documents
from megatron_cp.data.indexed import IndexedDataset
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.packing import Packer, PackingConfig
from tests.data import corpora
from tests.faults.bad_files import write_corpus
from tests.faults.bad_inputs import BASE
from tests.faults.program import Launch, run_program
from tests.mcore.tiny_gpt import Case, parallel_state
from tests.ranks import run_on_ranks
from tests.training.commands import MODEL, SMALL_RUN, stopped


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    corpora.write_corpus(prefix, [100, 100])
    return str(prefix)


def planned(corpus: str, cp_size: int):
    """Three micro-batches of 64 tokens, the same wherever they are made."""
    documents = open_documents(Path(corpus))
    packer = Packer(documents.lengths, PackingConfig(seq_length=64))
    config, request = BatchConfig(seq_length=64), PlanRequest(cp_size=cp_size)
    return [plan_batch(build_batch(documents, (next(packer),), config), request) for _ in range(3)]


def compare(rank, world_size, corpus, layout, odd, change):
    """What each rank is told after one of them changed one micro-batch."""
    with parallel_state(Case(**layout)):
        from megatron_cp.training.same_batches import check_same_batches

        batches = planned(corpus, layout.get("cp", 1))
        if rank == odd and change == "token":
            tokens = batches[1].batch.tokens.copy()
            tokens[17] += 1
            batch = dataclasses.replace(batches[1].batch, tokens=tokens)
            batches[1] = dataclasses.replace(batches[1], batch=batch)
        if rank == odd and change == "plan":
            batches[2] = dataclasses.replace(batches[2], plans=planned(corpus, 4)[2].plans)
        if rank == odd and change == "fewer":
            batches = batches[:2]
        try:
            check_same_batches(batches, "step 7")
        except RuntimeError as problem:
            return f"{type(problem).__name__}: {problem}"
    return None


LAYOUTS = [({"cp": 2}, 2), ({"tp": 2}, 2), ({"pp": 2}, 2), ({"cp": 2, "tp": 2}, 4), ({"cp": 2}, 4)]


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_equal_batches_pass(corpus, layout, world_size):
    assert run_on_ranks(world_size, compare, corpus, layout, None, "none") == [None] * world_size


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("token", "tokens of micro-batch 1 of step 7"),
        ("plan", "plans of micro-batch 2 of step 7"),
        ("fewer", "tokens of micro-batch 2 of step 7"),
    ],
)
def test_a_difference_is_one_error_on_all_ranks_that_names_batch_and_ranks(
    corpus, layout, world_size, change, says
):
    odd = world_size - 1
    answers = run_on_ranks(world_size, compare, corpus, layout, odd, change)
    assert len(set(answers)) == 1
    assert answers[0].startswith(f"BatchesDifferError: {says}")
    # Two replicas of two context ranks: ranks 2 and 3 share the batch.
    sharing = [2, 3] if (layout, world_size) == ({"cp": 2}, 4) else list(range(world_size))
    assert f"on ranks {sharing}, which share it" in answers[0]
    if len(sharing) > 2:
        assert f"on ranks [{odd}], " in answers[0]


def tell(rank, world_size, corpus):
    """What all ranks hear of numbers that ride along."""
    with parallel_state(Case(cp=2)):
        from megatron_cp.training.same_batches import check_same_batches

        batches = planned(corpus, 2)
        numbers = (rank * 10, -(2**60) - rank)
        return check_same_batches(batches, "step 1", numbers), check_same_batches(batches, "step 1")


def test_every_rank_hears_what_the_others_told(corpus):
    everyone = [[rank * 10, -(2**60) - rank] for rank in range(4)]
    assert run_on_ranks(4, tell, corpus) == [(everyone, [[]] * 4)] * 4


def replicas_differ_rightly(rank, world_size, corpus):
    """Replicas hold other batches than each other, which is no difference."""
    with parallel_state(Case(cp=2)):
        from megatron_cp.training.same_batches import check_same_batches

        batches = planned(corpus, 2)
        check_same_batches(batches[:2] if rank < 2 else batches[1:], "step 1")
    return True


def test_replicas_may_hold_different_batches(corpus):
    assert all(run_on_ranks(4, replicas_differ_rightly, corpus))


def compare_spanning(rank, world_size, corpus, odd, change):
    """What each of four ranks is told where two replicas share one batch, or one rank believes otherwise."""
    with parallel_state(Case(cp=2)):
        from megatron_cp.training.same_batches import check_same_batches

        spans = not (rank == odd and change == "layout")
        cp_size = 2 if rank == odd and change in ("layout", "plan") else 4
        batches = [
            dataclasses.replace(one, spans_replicas=spans) for one in planned(corpus, cp_size)
        ]
        try:
            check_same_batches(batches, "step 7")
        except RuntimeError as problem:
            return f"{type(problem).__name__}: {problem}"
    return None


def test_a_batch_that_spans_replicas_is_the_same_on_all_ranks(corpus):
    assert run_on_ranks(4, compare_spanning, corpus, None, "none") == [None] * 4
    for change in ("plan", "layout"):
        answers = run_on_ranks(4, compare_spanning, corpus, 2, change)
        assert len(set(answers)) == 1
        told = "BatchesDifferError: plans of micro-batch 0 of step 7 are not the same on ranks [0, 1, 2, 3]"
        assert answers[0].startswith(told)
        assert "on ranks [2], " in answers[0]


def test_a_file_that_differs_where_the_start_does_not_look_stops_every_rank(tmp_path: Path):
    tokens = [i % 509 + 1 for i in range(400_000)]
    write_corpus(tmp_path / "good", [tokens[i : i + 100] for i in range(0, 400_000, 100)])
    changed = list(tokens)
    for block in range(63):  # between the blocks that the digest reads
        start = (block * (800_000 - 4096) // 63 + 4096) // 2 + 1
        for place in range(start, start + 4000):
            changed[place] = 511
    write_corpus(tmp_path / "other", [changed[i : i + 100] for i in range(0, 400_000, 100)])
    digests = {IndexedDataset(tmp_path / name).digest() for name in ("good", "other")}
    assert len(digests) == 1, "the start would have told them apart"
    per_rank = tuple(("--data-path", str(tmp_path / name)) for name in ("good", "other"))
    (ranks,) = run_program([Launch((*BASE, "--context-parallel-size", "2"), 2, per_rank)])
    for rank in ranks:
        assert rank.code == 1, rank.stderr[-3000:]
        (line,) = [x for x in rank.stderr.splitlines() if "error: " in x]
        assert "tokens of micro-batch" in line and "of step " in line


def test_token_files_with_other_manifests_are_one_line_on_every_rank_before_the_first_step(
    tmp_path: Path,
):
    for name in ("good", "other"):
        with IndexedWriter(tmp_path / name, dtype="uint16") as writer:
            for number in range(50):
                writer.add_document([number + (name == "other") * (number == 49)] * 100)
            writer.finish()
    flags = (*BASE, "--context-parallel-size", "2", "--run-dir", str(tmp_path / "run"))
    per_rank = tuple(("--data-path", str(tmp_path / name)) for name in ("good", "other"))
    (ranks,) = run_program([Launch(flags, 2, per_rank)])
    for rank in ranks:
        assert rank.code == 2, rank.stderr[-3000:]
        (line,) = rank.stderr.splitlines()
        assert (
            f"error: token file {tmp_path}/other.bin of ranks [1] is not {tmp_path}/good.bin"
            in line
        )
        assert "building GPT model" not in rank.stdout


def test_a_token_file_that_is_not_that_of_its_manifest_stops_every_rank_where_asked_for(
    tmp_path: Path,
):
    draw = np.random.default_rng(2)
    for name in ("good", "damaged"):
        with IndexedWriter(tmp_path / name, dtype="uint16") as writer:
            for _ in range(50):
                writer.add_document(draw.integers(1, 500, size=100))
            writer.finish()
    raw = bytearray((tmp_path / "damaged.bin").read_bytes())
    raw[4001] ^= 1
    (tmp_path / "damaged.bin").write_bytes(bytes(raw))
    flags = (*BASE, "--context-parallel-size", "2", "--verify-token-files")
    paths = [("--data-path", str(tmp_path / name)) for name in ("good", "damaged")]
    whole, damaged = run_program(
        [Launch((*flags, "--skip-train"), 2, (paths[0],) * 2), Launch(flags, 2, (paths[1],) * 2)]
    )
    assert [rank.code for rank in whole] == [0, 0], whole[0].stderr[-2000:]
    assert "SHA-256 of all token files are those of their manifests" in whole[0].stdout
    for rank in damaged:
        assert rank.code == 2, rank.stderr[-2000:]
        (line,) = [x for x in rank.stderr.splitlines() if "error: " in x]
        assert "damaged.bin: byte 0: checksum of the tokens" in line


def compare_failed(rank, world_size, corpus, failed):
    """What each rank is told where some have no batches."""
    with parallel_state(Case(cp=2)):
        from megatron_cp.training.same_batches import check_same_batches

        failure = ValueError(f"token id {rank} is none") if rank in failed else None
        try:
            check_same_batches([] if failure else planned(corpus, 2), "step 7", (), failure)
        except ValueError as problem:
            return f"{type(problem).__name__}: {problem}"
    return None


@pytest.mark.parametrize("failed", [[1], [2, 3], [0, 1, 2, 3]])
def test_a_rank_without_batches_stops_all_with_its_words(corpus, failed):
    answers = run_on_ranks(4, compare_failed, corpus, failed)
    assert set(answers) == {f"BatchError: ranks {failed}: step 7: token id {failed[0]} is none"}


@pytest.mark.parametrize(
    "layout", [[], ["--context-parallel-size", "2"]], ids=["replicas", "context"]
)
def test_a_token_that_no_vocabulary_has_ends_the_run_in_one_line_after_a_save(tmp_path, layout):
    with IndexedWriter(tmp_path / "corpus", dtype=np.int32) as writer:
        for document in range(60):
            writer.add_document(np.full(200, 4000 if document == 31 else document))
        writer.finish()
    flags = ["--data-path", str(tmp_path / "corpus"), "--split", "100,0,0", "--vocab-size", "512"]
    sizes = ["--seq-length", "128", "--micro-batch-size", "1", "--global-batch-size", "2"]
    steps = ["--train-iters", "60", "--lr", "1e-3", "--eval-iters", "0", "--num-workers", "1"]
    folders = ["--save", str(tmp_path / "ckpt"), "--run-dir", str(tmp_path / "run")]
    layout = [*layout, "--cp-planner", "zigzag"]
    line = stopped(2, *MODEL, *flags, *sizes, *steps, *folders, *layout, code=1)
    step = int(re.search(r"step (\d+): token id 4000 at position", line)[1])
    assert step > 1
    newest = (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text()
    assert int(newest) == step - 1


def test_packs_that_a_planner_cannot_place_end_the_run_in_one_line(tmp_path: Path):
    """The first pack, which is planned before the ranks meet, has one placement for both masks; a later one has not."""
    windows = ["--window-size", "15,0", "--window-attn-skip-freq", "2"]
    planner = ["--context-parallel-size", "2", "--cp-planner", "document_groups"]
    line = stopped(2, *SMALL_RUN, *windows, *planner, "--save", str(tmp_path), code=1)
    assert re.search(r"step 2: planner='document_groups' places tokens by the mask", line)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
