"""Names and small files of a checkpoint folder, in Megatron-LM's layout; no tensors here.

<save>/latest_checkpointed_iteration.txt    written last: names only complete checkpoints
<save>/iter_0000010/                        the tensors, in one of two formats
<save>/iter_0000010/megatron_cp.json        our manifest: model shape, layout, loader state, sizes and SHA-256 of files
<save>/progress.txt                         with --log-progress
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_cp.errors import ANOTHER_CHECKPOINT, DamagedCheckpointError
from megatron_cp.mcore.settings.mixers import MAMBA, layer_mixers_of, linear_layers_of, mamba_sizes
from megatron_cp.mcore.settings.sparse_settings import is_sparse, layers_that_pick
from megatron_cp.training.checkpoint import integrity
from megatron_cp.training.whole_files import free_name, write_atomically, written_aside

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # what a tracker holds in place of a number, and the folder it means
MANIFEST = "megatron_cp.json"
FORMAT = 2  # of the manifest; since 2 it holds the SHA-256 of itself
_ENTRIES_OF_FORMAT_1 = frozenset(
    {"format", "iteration", "shape", "meaning", "layout", "data", "restarts", "files", "sha256"}
)

# What must be equal between a checkpoint and the model that loads it.
SHAPE_ARGUMENTS = (
    "hybrid_layer_pattern",  # first: with another kind of model layers are counted otherwise
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "padded_vocab_size",
    "normalization",
    "swiglu",
    "squared_relu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "softmax_type",
    "experimental_attention_variant",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk_freq",
    "dsa_indexer_skip_topk_offset",
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
)

_OF_LINEAR_LAYERS = tuple(name for name in SHAPE_ARGUMENTS if name.startswith("linear_"))
_OF_MAMBA = tuple(name for name in SHAPE_ARGUMENTS if name.startswith("mamba_"))
# Latent attention has sizes of its own, which its tensors show, and does not read these.
_OF_PLAIN_HEADS = ("num_query_groups", "kv_channels")

# Of these, what decides which tensors there are, but not the shape or the meaning of the others.
_WHICH_TENSORS = frozenset(
    {"add_bias_linear", "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights"}
)

# What they were before they could be said: of checkpoints from then.
_BEFORE = {"dsa_indexer_topk_freq": 1, "dsa_indexer_skip_topk_offset": 0}

# Flags that are not the argument's name with dashes.
_SPELLED = {
    "add_bias_linear": "--disable-bias-linear",
    "padded_vocab_size": "a padded --vocab-size (see --make-vocab-size-divisible-by) of",
}


def shape_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a manifest keeps of the model: which layers are linear, however that was said, and their sizes."""
    shape = {name: arguments[name] for name in SHAPE_ARGUMENTS}
    if arguments["multi_latent_attention"]:
        shape |= dict.fromkeys(_OF_PLAIN_HEADS)
    settings = Namespace(**arguments)
    if not is_sparse(settings) or all(layers_that_pick(settings)):
        shape |= _BEFORE
    mixers = layer_mixers_of(arguments)
    if MAMBA in mixers:
        shape["mamba_num_heads"] = mamba_sizes(settings).num_heads
    else:
        shape |= dict.fromkeys(_OF_MAMBA)
    if not any(linear_layers_of(arguments)):
        return shape | dict.fromkeys(_OF_LINEAR_LAYERS)
    return shape | {"linear_attention_freq": [int(one) for one in linear_layers_of(arguments)]}


def iteration_folder(root: str | Path, iteration: int) -> Path:
    """Returns `<root>/iter_0000010`."""
    return Path(root) / f"iter_{iteration:07d}"


def unfinished_folder(root: str | Path, iteration: int) -> Path:
    """Returns where the checkpoint of `iteration` is written before `publish` puts it in its place."""
    return Path(root) / f"{iteration_folder(root, iteration).name}.unfinished"


def _replaced_folder(root: Path, iteration: int) -> Path:
    """Returns where the checkpoint of `iteration` is after another was saved over it, until it is removed."""
    return Path(root) / f"{iteration_folder(root, iteration).name}.replaced"


def remove_folder(folder: Path) -> None:
    """Removes the folder with all it holds; what a link points at stays."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def publish(root: Path, iteration: int) -> None:
    """Puts the complete, unfinished folder in its place and makes the tracker name it.

    Where the tracker already names this iteration, it names the newest earlier complete one, or
    nothing, while one folder replaces the other, which stays beside it until `remove_replaced`. What needs
    space is written first: on a full disk nothing has changed.
    """
    unfinished, folder = unfinished_folder(root, iteration), iteration_folder(root, iteration)
    tracker, replaced = root / TRACKER, _replaced_folder(root, iteration)
    remove_folder(replaced)
    named = written_aside(tracker, str(iteration))
    if folder.exists() or folder.is_symlink():
        if previous_iteration(root) == iteration:
            earlier = earlier_iteration(root, iteration)
            if earlier is None:
                tracker.unlink()
            else:
                write_atomically(tracker, str(earlier))
        folder.replace(replaced)
    unfinished.replace(folder)
    named.replace(tracker)


def move_aside(root: Path, after: int | None = None) -> Path | None:
    """Moves complete checkpoints and the tracker that names one into a folder of their own; None where none does.

    With `after` it moves those of later iterations alone, where the tracker names one of them; it names `after` then.
    The folder that it returns can be loaded.
    """
    later = [n for n in iterations_before(root, None) if after is None or n > after]
    with suppress(DamagedCheckpointError):
        named = latest_iteration(root)
        if named is None or (after is not None and named <= after):
            return None
    if after is not None and not later:
        return None
    aside = free_name(root)
    aside.mkdir()
    shutil.copyfile(root / TRACKER, aside / TRACKER)
    if after is None:
        (root / TRACKER).unlink()
    else:
        write_atomically(root / TRACKER, str(after))
    for number in later:
        folder = iteration_folder(root, number)
        if folder.is_dir() and not folder.is_symlink():
            folder.rename(aside / folder.name)
    return aside


def earlier_iteration(root: Path, iteration: int) -> int | None:
    """Returns the newest iteration before this one whose checkpoint is complete; None without one."""
    for number in iterations_before(root, iteration):
        try:
            if read_manifest(iteration_folder(root, number)) is not None:
                return number
        except ValueError:
            continue
    return None


def iterations_before(root: str | Path, iteration: int | None) -> Iterator[int]:
    """Yields the iterations below this one (None: all) that have a folder, the newest first."""
    found = (p.name.removeprefix("iter_") for p in Path(root).glob("iter_*") if p.is_dir())
    for number in sorted((int(text) for text in found if text.isdigit()), reverse=True):
        if iteration is None or number < iteration:
            yield number


def latest_iteration(root: str | Path) -> int | None:
    """Returns the iteration that the tracker names; None without a tracker, and for a release.

    Raises ValueError on a damaged one.
    """
    tracker = Path(root) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == RELEASE:
        return None
    if not (text.isascii() and text.isdigit()):
        raise DamagedCheckpointError(
            f"{tracker} holds {text[:40]!r}; it must be an iteration number; write the number of a complete "
            "iter_ folder into it, or give --ckpt-step, or --ckpt-fallback for the newest good one"
        )
    return int(text)


def previous_iteration(root: Path) -> int | None:
    """Returns the iteration that the tracker names before a save; None where it is damaged too.

    A run that went on from beside a damaged tracker writes a new one over it.
    """
    try:
        return latest_iteration(root)
    except DamagedCheckpointError:
        return None


def names_a_checkpoint(root: str | Path) -> bool:
    """Whether there is a tracker, as far as Megatron-LM asks: what it names may be damaged or missing."""
    return (Path(root) / TRACKER).is_file()


def is_release(root: str | Path) -> bool:
    """Whether the tracker names a release: weights alone, as Megatron-LM's converters leave them."""
    tracker = Path(root) / TRACKER
    return tracker.is_file() and tracker.read_text(errors="replace").strip() == RELEASE


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Writes our manifest, with the size and the SHA-256 of every file of the checkpoint as it is now."""
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in files_of(folder)}
    hashes = integrity.take_hashes(folder, list(files))
    content = {**content, "format": FORMAT, "files": files, "sha256": hashes}
    content[integrity.SEAL] = integrity.seal_of(content)
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1, sort_keys=True))


def files_of(folder: Path) -> list[Path]:
    """Returns every file below the folder that is part of the checkpoint, sorted.

    The manifest, its temporary twins and hashes that wait for it are not.
    """
    found = (p for p in folder.rglob("*") if p.is_file() and MANIFEST not in p.name)
    return sorted(p for p in found if not integrity.is_aside(p))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Returns our manifest; None for a checkpoint that Megatron-LM wrote.

    Raises DamagedCheckpointError where the manifest is damaged, or a file that it lists is missing or
    has another size.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _check_seal(content)
        files = dict(content["files"])
        hashes = dict(content.get("sha256", files))  # the first of format 1 have none
        if hashes.keys() != files.keys():
            raise KeyError("sha256")
        dict(content["shape"]), dict(content["data"]), int(content["restarts"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as problem:
        raise DamagedCheckpointError(
            f"{path} is damaged ({problem}); {ANOTHER_CHECKPOINT}"
        ) from None
    for name, size in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DamagedCheckpointError(
                f"{path} is damaged: it names {name!r}, which is outside of the checkpoint; {ANOTHER_CHECKPOINT}"
            )
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes"
            raise DamagedCheckpointError(
                f"{file} is {state}; it must have {size} bytes; {ANOTHER_CHECKPOINT}"
            )
    return content


def _check_seal(content: dict[str, Any]) -> None:
    """Raises ValueError unless a manifest says of itself what it says; KeyError where an entry is lost.

    Format 1 held no hash of itself: there an entry that it never had is what a flipped bit made of another.
    """
    form = content["format"]
    if type(form) is not int or form not in (1, FORMAT):
        raise ValueError(f"it says format {str(form)[:40]}, and 1 and {FORMAT} are known")
    if form == 1 and (unknown := content.keys() - _ENTRIES_OF_FORMAT_1):
        raise ValueError(f"it holds {min(unknown)[:40]!r}, which is no entry of format 1")
    if form != 1 and content[integrity.SEAL] != integrity.seal_of(content):
        raise ValueError("it does not hold what was saved: another SHA-256")
    if form != 1 and "sha256" not in content:
        raise KeyError("sha256")


def check_shape(
    folder: Path,
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    may_add_tensors: bool = False,
) -> None:
    """Raises ValueError for a checkpoint of another model, naming the first argument that differs.

    With `may_add_tensors` it passes over arguments that only decide which tensors there are.
    """
    for name in SHAPE_ARGUMENTS:
        if may_add_tensors and name in _WHICH_TENSORS:
            continue
        if name in _OF_PLAIN_HEADS and None in (saved.get(name), wanted[name]):
            continue
        was, now = saved.get(name, _BEFORE.get(name, wanted[name])), wanted[name]
        if was != now:
            flag = _SPELLED.get(name, "--" + name.replace("_", "-"))
            if name == "add_bias_linear":  # its flag says the opposite
                was, now = not was, not now
            advice = "give the checkpoint's value, or another --load"
            if name in _WHICH_TENSORS:
                advice += ", or --dist-ckpt-strictness log_all with --finetune or --no-load-optim"
            raise ValueError(f"{folder} was saved with {flag} {was}, this run has {now}; {advice}")


def remove_replaced(
    root: Path, previous: int | None, current: int, retain_interval: int | None
) -> Path | None:
    """Removes what `publish` replaced, and the checkpoint before `current` unless --save-retain-interval keeps it.

    Returns the folder of the latter if it was removed, or None.
    """
    remove_folder(_replaced_folder(root, current))
    if (
        retain_interval is None
        or previous is None
        or previous == current
        or previous % retain_interval == 0
    ):
        return None
    folder = iteration_folder(root, previous)
    if not folder.is_dir() or folder.is_symlink():
        return None
    shutil.rmtree(folder)
    return folder
