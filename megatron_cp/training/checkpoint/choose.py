"""Which checkpoint a run goes on from: the one that the tracker names, or the last good one before it.

    before any process group    format, manifest, sizes, model shape          check_checkpoint
    together, before a load     all of it again, SHA-256, what files reach    choose_checkpoint

A checkpoint of another model, or one that asks for code, is refused; only damage makes a run go further back, and
only where `--ckpt-fallback` says so: by itself after an elastic restart, where stopping would end every further
restart at the same file.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_cp.errors import DamagedCheckpointError, unreadable
from megatron_cp.training.checkpoint import files, formats, integrity, places
from megatron_cp.training.checkpoint.compare import leaves_out
from megatron_cp.training.checkpoint.meaning import changes_of_meaning
from megatron_cp.training.config import CheckpointConfig, TrainConfig
from megatron_cp.training.logging.lines import print_rank_0
from megatron_cp.training.together import gather

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"

Manifest = dict[str, Any] | None


def named_folder(root: str, step: int | None) -> Path | None:
    """Returns the folder of the checkpoint to load: of this step, or the tracker's; None where that names none.

    Raises DamagedCheckpointError for a damaged tracker.
    """
    if step is None and files.is_release(root):
        return Path(root) / files.RELEASE
    iteration = step if step is not None else files.latest_iteration(root)
    return None if iteration is None else files.iteration_folder(root, iteration)


def check_checkpoint(config: TrainConfig) -> None:
    """Returns where a checkpoint can be loaded as far as one rank sees without reading tensors.

    Needs no process group. Raises ValueError for a missing, damaged or foreign checkpoint; damage waits until ranks
    have met where another one may want to go further back.
    """
    damage: DamagedCheckpointError | None = None
    for folder in _candidates_of(config, falls_back(config.checkpoint)):
        try:
            if isinstance(folder, DamagedCheckpointError):
                raise folder
            _read_manifest(folder, config)
        except DamagedCheckpointError as problem:
            damage = damage or problem
            continue
        return
    if damage is not None:
        if not _another_may_fall_back(config.checkpoint):
            raise damage
        return
    if config.checkpoint.exit_on_missing_checkpoint:
        raise ValueError(
            f"--load {config.checkpoint.load} holds no checkpoint and "
            "--exit-on-missing-checkpoint was given"
        )
    if config.checkpoint.finetune:
        raise ValueError(
            f"--load {config.checkpoint.load} holds no checkpoint, whose weights --finetune begins with; give the "
            "folder that has them, or leave out --finetune to begin with random ones"
        )


def choose_checkpoint(config: TrainConfig) -> tuple[Path, Manifest] | None:
    """Returns the folder to load and its manifest, whole as far as hashes tell; None without any.

    Collective: every rank calls it, and all choose the same. What is damaged on any rank is told by rank
    0 with the file and the reason. Raises ValueError on every rank alike where nothing may be loaded.
    """
    wishes = gather(falls_back(config.checkpoint))
    first: str | None = None
    for candidate in _candidates_of(config, any(wishes)):
        manifest, damage = _examine(candidate, config)
        if damage is None:
            assert isinstance(candidate, Path)
            if first is not None:
                print_rank_0(f"WARNING: going back to {candidate}, the last good checkpoint")
            return candidate, manifest
        if any(wishes):
            print_rank_0(f"WARNING: damaged checkpoint: {damage}")
        first = first or damage
    if first is None:
        return None
    raise ValueError(f"{first}; no earlier one is whole" if any(wishes) else first)


def falls_back(options: CheckpointConfig | Namespace) -> bool:
    """Returns whether this rank would go back to an earlier checkpoint.

    Nodes count restarts each for themselves, so ranks may differ until they have asked each other.
    """
    if options.ckpt_step is not None:
        return False
    if options.ckpt_fallback is not None:
        return bool(options.ckpt_fallback)
    count = os.environ.get(RESTARTS, "0")
    return count.isdigit() and int(count) > 0


def _another_may_fall_back(options: CheckpointConfig) -> bool:
    """Whether a node may have been started again that counts restarts of its own: this one may be new in its place."""
    if options.ckpt_step is not None or options.ckpt_fallback is not None:
        return False
    allowed = os.environ.get(MAX_RESTARTS, "0")
    return allowed.isdigit() and int(allowed) > 0


def _candidates_of(config: TrainConfig, goes_back: bool) -> Iterator[Path | DamagedCheckpointError]:
    options = config.checkpoint
    assert options.load is not None
    return candidates(options.load, options.ckpt_step, goes_back=goes_back)


def candidates(
    root: str, step: int | None, *, goes_back: bool
) -> Iterator[Path | DamagedCheckpointError]:
    """Yields the checkpoint that is named, or why none can be, and those before it where a run goes back."""
    iteration = None
    try:
        folder = named_folder(root, step)
        if folder is None:
            return
        yield folder
        if folder.name == files.RELEASE:
            return
        iteration = int(folder.name.removeprefix("iter_"))
    except DamagedCheckpointError as damage:  # of the tracker
        yield damage
    if goes_back:
        for number in files.iterations_before(root, iteration):
            yield files.iteration_folder(root, number)


def _read_manifest(folder: Path, config: TrainConfig) -> Manifest:
    """Returns the manifest of a checkpoint whose files have their sizes and whose model is ours.

    None for one that Megatron-LM wrote. Raises ValueError; DamagedCheckpointError for damage.
    """
    if formats.detect(folder) == "torch":
        formats.check_legacy_layout(folder, config)
    manifest = files.read_manifest(folder)
    if manifest is not None:
        # Which tensors there are is compared, and judged, when they are known.
        tolerant = leaves_out(config.checkpoint.dist_ckpt_strictness)
        shape = files.shape_of(config.arguments)
        files.check_shape(folder, manifest["shape"], shape, may_add_tensors=tolerant)
    return manifest


def _examine(
    candidate: Path | DamagedCheckpointError, config: TrainConfig
) -> tuple[Manifest, str | None]:
    """Returns the manifest, and what any rank found damaged, None if nothing; collective.

    Raises ValueError on every rank alike for what no other file would mend.
    """
    manifest: Manifest = None
    problem: ValueError | None = None
    try:
        if isinstance(candidate, DamagedCheckpointError):
            raise candidate
        manifest = _read_manifest(candidate, config)
        _check_contents(candidate, manifest, config.checkpoint)
        places.check_reach(candidate)
    except ValueError as refusal:
        problem = refusal
    except OSError as failure:  # on this rank's node, say: the others must hear of it
        path = str(failure.filename or candidate)
        problem = unreadable(path, failure)
    said = gather(
        None if problem is None else (isinstance(problem, DamagedCheckpointError), str(problem))
    )
    for is_damage, text in filter(None, said):
        if not is_damage:
            raise ValueError(text) from problem
    damage = next((text for _, text in filter(None, said)), None)
    if damage is None:
        meaning = {} if manifest is None else manifest.get("meaning", {})
        for change in changes_of_meaning(meaning, config.arguments):
            print_rank_0(f"note: {change}: the weights of {candidate} compute something else")
        if config.checkpoint.verify_checkpoint:
            assert isinstance(candidate, Path)
            print_rank_0(_said_of_contents(candidate, manifest))
    return manifest, damage


def _said_of_contents(folder: Path, manifest: Manifest) -> str:
    """Returns whether the files of a checkpoint were compared with what was saved."""
    if _hashes_of(manifest) is not None:
        return f" verified the contents of {folder}"
    return f" note: {folder} holds no SHA-256 of its files: their contents were not compared"


def _hashes_of(manifest: Manifest) -> dict[str, str] | None:
    """Returns the SHA-256 of every file; None for Megatron-LM's checkpoints, and for our first."""
    return None if manifest is None else manifest.get("sha256")


def _check_contents(folder: Path, manifest: Manifest, options: CheckpointConfig) -> None:
    """Raises ValueError if a file of this rank's share holds something else than was saved."""
    hashes = _hashes_of(manifest)
    if hashes is None:
        if options.verify_integrity:
            raise ValueError(
                f"{folder} holds no SHA-256 of its files to compare (--verify-integrity); it was saved by "
                "another program or an older version: load it without that flag"
            )
        return
    if options.verify_checkpoint:
        assert manifest is not None
        own = integrity.share_of(manifest["files"], dist.get_rank(), dist.get_world_size())
        integrity.check_hashes(folder, hashes, own)
