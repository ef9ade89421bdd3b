"""Faults planted into a run before it begins: numbers that are not finite, at a known place."""

import errno
import fcntl
import itertools
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

NOBODY = 65534
POISON = 777
"""A token that one document of the corpus holds."""


def _after_the_model_is_built(change) -> None:
    from megatron.core.utils import unwrap_model

    from megatron_cp.training import pretrain

    build = pretrain.build_model

    def built(config, provider, device):
        model = build(config, provider, device)
        for chunk in unwrap_model(model):
            change(chunk)
        return model

    pretrain.build_model = built


def nan_embedding(rank: int) -> None:
    """The embedding of the poisoned token is NaN: so is the loss of the document that holds it."""

    def change(chunk):
        if chunk.pre_process:
            with torch.no_grad():
                chunk.embedding.word_embeddings.weight[POISON] = torch.nan

    _after_the_model_is_built(change)


def infinite_gradient(rank: int) -> None:
    """The loss is finite, the gradient of the poisoned token is not."""

    def change(chunk):
        if not chunk.pre_process:
            return

        def poison(module, inputs, output):
            is_poisoned = (inputs[0] == POISON)[..., None]
            if output.requires_grad:
                output.register_hook(lambda grad: grad.masked_fill(is_poisoned, torch.inf))

        chunk.embedding.word_embeddings.register_forward_hook(poison)

    _after_the_model_is_built(change)


def transient_nan(rank: int) -> None:
    """One NaN on rank 1 in step 2, once: computed again, the step is good."""
    if rank != 1:
        return
    calls = [0]

    def once(module, inputs, output):
        calls[0] += 1
        return (output[0] * torch.nan, output[1]) if calls[0] == 3 else None

    _after_the_model_is_built(
        lambda chunk: chunk.decoder.layers[0].mlp.linear_fc1.register_forward_hook(once)
    )


def impatient(rank: int) -> None:
    """Ranks wait for each other for a quarter of a minute; whole ones are what the flag takes."""
    from megatron_cp.training import arguments

    parse = arguments.parse_arguments
    arguments.parse_arguments = lambda: parse().with_arguments(distributed_timeout_minutes=0.25)


def late_rank(rank: int) -> None:
    """Rank 1 stays in step 2 until rank 0 is gone, which holds a lock meanwhile; both impatient as above."""
    impatient(rank)
    path = f"{tempfile.gettempdir()}/lock_{os.environ['MASTER_PORT']}"
    lock = os.open(path, os.O_CREAT | os.O_RDWR)
    if rank == 0:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return
    calls = [0]

    def once(module, inputs, output):
        calls[0] += 1
        if calls[0] == 3:
            fcntl.flock(lock, fcntl.LOCK_EX)

    _after_the_model_is_built(
        lambda chunk: chunk.decoder.layers[0].mlp.linear_fc1.register_forward_hook(once)
    )


def without_locks(rank: int) -> None:
    """The file system has no record locks."""

    def refuse(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.lockf = refuse


def slow_clock(rank: int) -> None:
    """Rank 0 is busy for a second a step, rank 1 for two; wandb's alerts are lines of standard output."""
    from megatron_cp.training.logging import stragglers
    from megatron_cp.training.logging.tracking import Tracker

    ticks = itertools.count(step=1.0 + rank)
    stragglers.time = SimpleNamespace(perf_counter=lambda: next(ticks), thread_time=lambda: 0.0)
    Tracker.alert = lambda self, title, text: sys.stdout.write(f"alert: {title}: {text}\n")


def another_token(rank: int) -> None:
    """In step S one token of rank R is another; the environment's `CHANGED` is "R S folder".

    Ranks write there when that was and when they ended.
    """
    odd, step, folder = os.environ["CHANGED"].split(maxsplit=2)
    from megatron_cp.training import step as steps

    take, leave, taken_from = steps.next_batches, os._exit, []

    def note(what: str) -> None:
        Path(folder, f"{what}_{rank}").write_text(repr(time.time()))

    def taken(loader):
        batches = take(loader)
        taken_from.append(loader)
        train = taken_from[0]  # an evaluation has another loader
        is_time = loader is train and taken_from.count(train) == int(step)
        if is_time and rank == int(odd):
            tokens = batches[-1].batch.tokens.copy()
            tokens[-1] ^= 1
            changed = replace(batches[-1].batch, tokens=tokens)
            batches[-1] = replace(batches[-1], batch=changed)
            note("changed")
        return batches

    def left(code: int) -> None:
        note("ended")
        leave(code)

    steps.next_batches, os._exit = taken, left


def a_new_node(rank: int) -> None:
    """Rank 0 was started again by its agent, as agents may twice; that of rank 1 is new."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1" if rank == 0 else "0"
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "2"


def a_worker_dies(rank: int) -> None:
    """The loader's worker is killed before it gives the batches of the fifth step."""
    from megatron_cp.data.worker import WorkerProcess

    receive, calls = WorkerProcess.receive, itertools.count(1)

    def received(worker):
        if next(calls) == 9:  # two micro-batches a step
            os.kill(worker.pid, signal.SIGKILL)
            worker._process.wait()
            worker._connection.close()
        return receive(worker)

    WorkerProcess.receive = received


def a_full_disk_for_records(rank: int) -> None:
    """Nothing can be appended to a file while three steps are taken; and then again."""
    from megatron_cp.training import whole_files
    from megatron_cp.training.logging import journal, records

    def refused(path, text):
        if any(f'"iteration": {step},' in text for step in (3, 4, 5)) or "Iteration: 3" in text:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        append(path, text)

    append = whole_files.append_whole
    records.append_whole = journal.append_whole = refused


def nobody(rank: int) -> None:
    """Another user, who may read the checkout and write nowhere but where modes let him; root's may write anywhere."""
    import pretrain_gpt  # noqa: F401  while it can be read
    from megatron_cp.training import leftovers  # noqa: F401

    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    tempfile.tempdir = os.environ["TMPDIR"]


def nobody_whose_folder_is_locked_at_the_second_save(rank: int) -> None:
    """As above; rank 1 takes the right to write away when the second save begins."""
    nobody(rank)
    from megatron_cp.training.checkpoint.save import Saver

    save, calls = Saver.save, [0]

    def locked(saver, *, is_last):
        calls[0] += 1
        if calls[0] == 2 and rank == 1:
            Path(os.environ["LOCKED"]).chmod(0o555)
        torch.distributed.barrier()
        save(saver, is_last=is_last)

    Saver.save = locked


def nobody_asks_for_the_kernel_cache(rank: int) -> None:
    """As above; prints why the cache of kernels cannot be made."""
    nobody(rank)
    from megatron_cp.kernels import cache

    try:
        cache.user_folder("kernels", "kernel")
    except OSError as problem:
        sys.stderr.write(f"{problem}\n")
        raise SystemExit(2) from None


def saves_as_transformer_engine(rank: int) -> None:
    """Saves norms under the names of Transformer Engine's layers.

    They fuse the norms of latent attention and that before an MLP, and not that before experts.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from megatron_cp.training.checkpoint import dist_format

    plain = dist_format._to_save
    latent = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    latent |= {f"{x}_layernorm.": f"linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")}
    experts = {"layers.0.mlp.linear_fc1.layer_norm_": "layers.0.pre_mlp_layernorm."}
    table = latent if "--multi-latent-attention" in sys.argv else experts

    def to_save(state):
        tensors, described = plain(state)
        for item in nested_values(tensors):
            for local, fused in table.items():
                if hasattr(item, "key"):
                    item.key = item.key.replace(f".{local}", f".{fused}")
        return tensors, described

    dist_format._to_save = to_save


def save_once(rank: int) -> None:
    """No fault: the first checkpoint is written, and no later one, for runs that go on from its step."""
    from megatron_cp.training.checkpoint.save import Saver

    save = Saver.save

    def save_first(saver: Saver, *, is_last: bool = False) -> None:
        if saver.newest is None:
            save(saver, is_last=is_last)

    Saver.save = save_first
