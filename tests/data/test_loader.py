"""The loader: same stream whatever the workers, resumable at every step, never hanging."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

from megatron_cp.config import CPConfig
from megatron_cp.data.batch import BatchConfig, PlanRequest
from megatron_cp.data.blend import open_blend
from megatron_cp.data.blend_sources import parse_blend
from megatron_cp.data.loader import LoaderConfig, PackedLoader
from megatron_cp.data.packing import PackingConfig
from tests.data.corpora import write_corpus
from tests.processes import HANG_SECONDS, is_running, wait_until

REQUEST = PlanRequest(cp_size=2, config=CPConfig(planner="zigzag"))
SETTINGS = {
    "seq_length": 16,
    "policy": "keep",
    "keep_buffer": 5,
    "reset_attention_mask": True,
    "global_batch_size": 4,
}


def config_of(**settings):
    """The config in which each setting stands in every part that knows it."""

    def of(kind):
        return {f.name: settings[f.name] for f in fields(kind) if f.name in settings}

    return LoaderConfig(
        packing=PackingConfig(**of(PackingConfig)),
        batch=BatchConfig(**of(BatchConfig)),
        **of(LoaderConfig),
    )


def changed(**settings):
    return config_of(**{**SETTINGS, **settings})


CONFIG = config_of(**SETTINGS)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    lengths = np.random.default_rng(3).integers(0, 40, 30).tolist()
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths)


def fingerprint(planned):
    batch = planned.batch
    content = hashlib.sha256()
    for array in (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids):
        content.update(array.tobytes())
    plans = {name: plan.digest() for name, plan in planned.plans.items()}
    return content.hexdigest(), batch.mask.digest(), plans, batch.document_lengths


def steps_of(loader, count):
    return [
        [fingerprint(next(loader)) for _ in range(loader.num_microbatches)] for _ in range(count)
    ]


def packs_of_step(documents, config, dp_size, state=None):
    """The packs of the next global batch over all ranks, and the state after it on each."""
    packs, states = [], []
    for rank in range(dp_size):
        with PackedLoader(documents, config, dp_rank=rank, dp_size=dp_size) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for _ in range(loader.num_microbatches):
                batch = next(loader).batch
                packs += [
                    row.tobytes() for row in batch.tokens.reshape(-1, config.packing.seq_length)
                ]
            states.append(loader.state_dict())
    return sorted(packs), states


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blend")
    for name, lengths in (("a", [5, 40, 9]), ("b", [16] * 8)):
        write_corpus(folder / name, lengths)
    return open_blend(parse_blend(["2", str(folder / "a"), "1", str(folder / "b")]))


@pytest.mark.parametrize("packing", ["split", "keep"])
def test_a_blend_is_resumed_exactly_with_any_number_of_ranks(blend, packing):
    config = changed(policy=packing)
    packs, states = packs_of_step(blend, config, 1)
    expected, _ = packs_of_step(blend, config, 1, states[0])
    for dp_size in (2, 4):
        assert packs_of_step(blend, config, dp_size)[0] == packs
        resumed, _ = packs_of_step(blend, config, dp_size, json.loads(json.dumps(states[0])))
        assert resumed == expected


def test_a_blend_and_one_of_its_corpora_refuse_each_other_s_state(blend):
    with PackedLoader(blend, CONFIG) as mixed, PackedLoader(blend.corpora[0], CONFIG) as alone:
        for first, second in ((mixed, alone), (alone, mixed)):
            with pytest.raises(ValueError, match="another corpus"):
                first.load_state_dict(second.state_dict())


def test_a_state_of_the_first_version_is_taken_up(tmp_path):
    """Keys and values as written by runs from before there were blends."""
    documents = write_corpus(tmp_path / "c", [10, 10, 10])
    config = config_of(seq_length=4, global_batch_size=2, shuffle=False)
    state = {
        "version": 1,
        "corpus": documents.digest(),
        "seq_length": 4,
        "packing": "split",
        "seed": 1234,
        "shuffle": False,
        "keep_buffer": 0,
        "epoch": 0,
        "cursor": 1,
        "carry": [[0, 8, 10]],
        "consumed_samples": 2,
    }
    with PackedLoader(documents, config) as loader:
        first = [next(loader).batch.tokens.tolist() for _ in range(2)]
        assert loader.state_dict() == state
        loader.load_state_dict(state)
        assert next(loader).batch.tokens.tolist() == [1008, 1009, 2000, 2001]
    assert sorted(first) == [[1000, 1001, 1002, 1003], [1004, 1005, 1006, 1007]]


@pytest.mark.parametrize("packing", ["split", "keep"])
@pytest.mark.parametrize("num_workers", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_resuming_at_every_step_replays_the_same_stream(documents, packing, num_workers):
    config = changed(policy=packing, micro_batch_size=2)
    num_steps = 12  # more than one epoch
    with PackedLoader(documents, config, REQUEST) as loader:
        states = [loader.state_dict()]
        stream = []
        for _ in range(num_steps):
            stream += steps_of(loader, 1)
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert states[-1]["epoch"] >= 1
    with PackedLoader(documents, replace(config, num_workers=num_workers), REQUEST) as loader:
        # Each time new workers start: with them at a few steps, in both epochs.
        for step in range(0, num_steps, 5 if num_workers else 1):
            loader.load_state_dict(states[step])
            assert loader.consumed_samples == 4 * step
            count = min(3, num_steps - step)
            assert steps_of(loader, count) == stream[step : step + count]
            assert loader.state_dict() == states[step + count]


@pytest.mark.parametrize("packing", ["split", "keep"])
def test_the_packs_of_a_global_batch_do_not_depend_on_the_number_of_ranks(documents, packing):
    config = changed(policy=packing, global_batch_size=8)
    state = None
    for dp_size in (1, 2, 4, 2, 8, 1):  # the run changes its size after every step
        expected, states = packs_of_step(documents, config, 1, state)
        packs, states = packs_of_step(documents, config, dp_size, state)
        assert packs == expected
        assert all(s == states[0] for s in states)
        state = states[0]


def test_the_batch_size_may_change_on_resume(documents):
    first = changed(global_batch_size=2)
    with PackedLoader(documents, first) as loader:
        steps_of(loader, 3)
        state = loader.state_dict()
        small = [p.batch.tokens.tobytes() for p in (next(loader) for _ in range(6))]
    with PackedLoader(documents, changed(global_batch_size=6)) as loader:
        loader.load_state_dict(state)
        large = [next(loader).batch.tokens.tobytes() for _ in range(6)]
    assert sorted(large) == sorted(small)


def test_work_is_balanced_over_ranks_by_area(tmp_path):
    documents = write_corpus(tmp_path / "c", [64] * 4 + [8] * 96)
    config = config_of(
        seq_length=64, global_batch_size=16, reset_attention_mask=True, shuffle=False
    )
    areas = []
    for rank in range(4):
        with PackedLoader(documents, config, dp_rank=rank, dp_size=4) as loader:
            areas.append(
                sum(next(loader).batch.mask.area() for _ in range(loader.num_microbatches))
            )
    assert len(set(areas)) == 1  # each has one long document; in order, rank 0 would have all four


def test_every_rank_of_a_replica_makes_the_same_plans(documents):
    loaders = [PackedLoader(documents, CONFIG, REQUEST, dp_rank=1, dp_size=2) for _ in range(2)]
    assert steps_of(loaders[0], 4) == steps_of(loaders[1], 4)


def test_the_state_is_small_and_taken_between_steps_only(documents):
    with PackedLoader(documents, CONFIG) as loader:
        next(loader)
        with pytest.raises(RuntimeError, match="between the 4 micro-batches"):
            loader.state_dict()
        for _ in range(3):
            next(loader)
        assert len(json.dumps(loader.state_dict())) < 1000
        assert loader.consumed_samples == 4


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seq_length": 32}, "seq_length=16, this run has 32"),
        ({"policy": "split"}, "packing='keep', this run has 'split'"),
        ({"seed": 1}, "seed=1234, this run has 1"),
        ({"keep_buffer": 9}, "keep_buffer=5, this run has 9"),
        ({"shuffle": False}, "shuffle=True"),
    ],
)
def test_a_state_of_other_settings_is_refused(documents, change, name):
    with PackedLoader(documents, CONFIG) as loader:
        state = loader.state_dict()
    other = PackedLoader(documents, changed(**change))
    with other, pytest.raises(ValueError, match=name):
        other.load_state_dict(state)


def test_a_state_of_another_corpus_or_damaged_is_refused(documents, tmp_path):
    with PackedLoader(documents, CONFIG) as loader:
        state = loader.state_dict()
        for name in ("carry", "cursor", "consumed_samples"):
            broken = {k: v for k, v in state.items() if k != name}
            with pytest.raises(ValueError, match="loader state is damaged"):
                loader.load_state_dict(broken)
        with pytest.raises(ValueError, match="version=None"):
            loader.load_state_dict({})
    other = write_corpus(tmp_path / "other", [5, 6])
    with PackedLoader(other, CONFIG) as loader, pytest.raises(ValueError, match="another corpus"):
        loader.load_state_dict(state)


def test_a_killed_worker_is_an_error_that_names_it(documents):
    loader = PackedLoader(documents, changed(num_workers=2))
    next(loader)
    pids = [worker.pid for worker in loader._workers]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"data worker 1 \(pid {pids[1]}\) died.*SIGKILL"):
        for _ in range(10):
            next(loader)
    for pid in pids:  # no worker outlives the error
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_a_stopped_worker_is_an_error_after_the_timeout(documents):
    loader = PackedLoader(documents, changed(num_workers=1))
    next(loader)
    loader._workers[0]._timeout_s = 1.0  # only now: its start takes as long as the machine needs
    pid = loader._workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="gave no batch within 1 s"):
        for _ in range(10):
            next(loader)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_data_is_the_same_error_inline_and_in_a_worker(documents, num_workers):
    config = changed(vocab_size=1000, num_workers=num_workers)
    message = r"token id \d+ at position \d+ of document \d+ of"
    with PackedLoader(documents, config) as loader, pytest.raises(ValueError, match=message):
        next(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_packs_that_a_planner_refuses_are_the_same_error_inline_and_in_a_worker(
    documents, num_workers
):
    """Places that follow the mask are not one for two masks."""
    window = {"num_full_layers": 1, "num_window_layers": 1, "window": (3, 0)}
    planned = PlanRequest(cp_size=2, config=CPConfig(planner="magi", topology="cpu"), **window)
    config = changed(num_workers=num_workers)
    with (
        PackedLoader(documents, config, planned) as loader,
        pytest.raises(NotImplementedError, match=r"^planner='magi' places tokens by the mask"),
    ):
        for _ in range(20):
            next(loader)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda prefix: prefix.with_suffix(".idx").unlink(), r"c\.idx does not exist"),
        (lambda prefix: os.truncate(f"{prefix}.bin", 8), r"c\.bin: byte 8: file size"),
        (lambda prefix: write_corpus(prefix, [7, 9]), "was replaced while the run was reading it"),
    ],
)
def test_a_worker_that_finds_other_files_says_so_in_one_line(tmp_path, capfd, change, message):
    with PackedLoader(write_corpus(tmp_path / "c", [9, 7]), changed(num_workers=1)) as loader:
        change(tmp_path / "c")
        with pytest.raises(ValueError, match=message):
            next(loader)
    assert "Traceback" not in capfd.readouterr().err


def test_settings_that_cannot_work_are_refused_before_any_worker_starts(documents, tmp_path):
    with pytest.raises(ValueError, match="global_batch_size=4 must be a multiple of dp_size"):
        PackedLoader(documents, CONFIG, dp_size=3)
    with pytest.raises(ValueError, match=r"dp_rank=2 must be in \[0, 2\)"):
        PackedLoader(documents, CONFIG, dp_rank=2, dp_size=2)
    with pytest.raises(ValueError, match="num_workers=-1"):
        changed(num_workers=-1)
    with pytest.raises(ValueError, match=r"batch\.seq_length=8 must equal packing\.seq_length=16"):
        replace(CONFIG, batch=BatchConfig(seq_length=8))
    mixed = write_corpus(tmp_path / "c", [5, 6], [0, -1])
    with pytest.raises(ValueError, match=r"document 1 of .*set --reset-attention-mask"):
        PackedLoader(mixed, changed(reset_attention_mask=False))


def test_workers_end_when_the_trainer_is_killed(documents):
    program = (
        "import os, signal, sys\n"
        "from megatron_cp.data import *\n"
        "packing, batch = PackingConfig(seq_length=16), BatchConfig(seq_length=16)\n"
        "config = LoaderConfig(packing=packing, batch=batch, global_batch_size=4, num_workers=2)\n"
        "loader = PackedLoader(open_documents(sys.argv[1]), config)\n"
        "next(loader)\n"
        "print(*[worker.pid for worker in loader._workers], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, documents.dataset.prefix]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=HANG_SECONDS)
    assert result.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)), "a worker outlived its trainer")
