"""What a corpus says of itself, `<prefix>.manifest.json`: sizes, checksums, and the tokenizer that made it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_cp.data.tokenizer import Tokenizer

REBUILD = "rebuild the corpus with tools/preprocess_data.py"


def manifest_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns `<prefix>.manifest.json`: sizes and checksums, written by `IndexedWriter.finish`."""
    return Path(f"{os.fspath(prefix)}.manifest.json")


def read_manifest(path: Path, idx_path: Path, index_bytes: bytes, bin_bytes: int) -> dict[str, Any]:
    """Returns the manifest, with which index and size agree; empty without one (Megatron's).

    Raises ValueError, with file and byte, where they do not agree or it is no manifest.
    """
    if not path.is_file():
        return {}
    advice = f"{REBUILD}, or delete {path} if the files are right"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        want_idx, want_bytes = str(manifest["idx"]["sha256"]), int(manifest["bin"]["bytes"])
        str(manifest["bin"]["sha256"])  # for whoever asks later
        if "tokenizer" in manifest:
            made = manifest["tokenizer"]
            made["vocab_size"] = int(made["vocab_size"])  # text in older ones
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a corpus manifest ({type(error).__name__}: {error}); {advice}"
        ) from None
    have_idx = hashlib.sha256(index_bytes).hexdigest()
    if have_idx != want_idx:
        raise ValueError(
            f"{idx_path}: byte 0: checksum of the index: want {want_idx}, have {have_idx}; {advice}"
        )
    if bin_bytes != want_bytes:
        raise ValueError(
            f"{idx_path.with_suffix('.bin')}: byte {bin_bytes}: file size: want {want_bytes} "
            f"bytes, have {bin_bytes}; {advice}"
        )
    return manifest


def made_by(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what a manifest records of the tokenizer that makes a corpus."""
    facts = {**tokenizer.unique_identifiers, "vocab_size": tokenizer.vocab_size}
    return {"tokenizer": facts, "eod": tokenizer.eod}


def note_of_another_tokenizer(
    prefix: str, manifest: Mapping[str, Any], tokenizer: Tokenizer
) -> str | None:
    """Returns a note for a corpus that other files of a tokenizer made, which the run's may extend; else None.

    Raises ValueError for a corpus of more tokens, or with another end of document.
    """
    own, made = made_by(tokenizer)["tokenizer"], manifest.get("tokenizer")
    if made is None or made == own:
        return None
    size, eod = made["vocab_size"], manifest.get("eod")
    classes = f"{made.get('class')}, the run's is {own['class']}"
    if size <= tokenizer.vocab_size and eod == tokenizer.eod:
        return (
            f"{prefix} was made by other tokenizer files ({classes}), {size} tokens for {tokenizer.vocab_size} and "
            "the same end of document; texts come out wrong if its tokens have other numbers"
        )
    differs = f"end of document {eod}, not {tokenizer.eod}"
    if eod == tokenizer.eod:
        differs = f"vocab_size {size}, more than {tokenizer.vocab_size}"
    raise ValueError(
        f"{prefix} was made by another tokenizer ({classes}): {differs}; give the tokenizer that made it, or make "
        "it again with this one"
    )
