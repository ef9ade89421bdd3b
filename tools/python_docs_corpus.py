#!/usr/bin/env python
"""Documents found on every machine with Python, as train.jsonl and valid.jsonl.

    python tools/python_docs_corpus.py --output data/python-docs --max-mib 24

Sources and texts of the standard library, and of the packages installed beside it. Exact
duplicates are dropped. The held-out documents are those of other *packages*, not other files or
lines of the same ones, and a vendored copy of a package counts as that package. The licences of
the files are mixed: the corpus is for the machine it was made on. The same files give the same corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_cp.command_line import answering

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_VENDOR_FOLDERS = {"_vendor", "vendor", "_vendored", "vendored", "third_party", "extern"}


@dataclass(frozen=True)
class Document:
    """A file: `path` is relative and starts with the name of its root, `package` is its owner."""

    path: str
    package: str
    text: str
    sha256: str

    @property
    def num_bytes(self) -> int:
        """Size as UTF-8."""
        return len(self.text.encode("utf-8"))


def default_roots() -> dict[str, Path]:
    """The standard library and the installed packages of this interpreter, by name."""
    paths = sysconfig.get_paths()
    roots = {"stdlib": Path(paths["stdlib"]), "packages": Path(paths["purelib"])}
    return {name: root for name, root in roots.items() if root.is_dir()}


def package_of(parts: Sequence[str]) -> str:
    """The top-level package or module of a relative path; inside a vendor folder, the copied one.

    ("json", "decoder.py") -> "json";  ("pip", "_vendor", "rich", "text.py") -> "rich"
    """
    start = 0
    for index, part in enumerate(parts[:-1]):
        if part in _VENDOR_FOLDERS and parts[index + 1] != "__init__.py":
            start = index + 1
    name = parts[start]
    name = re.sub(r"-[^-]*(\.dist-info|\.egg-info|\.data)?$", "", name) if "-" in name else name
    name = name.split(".")[0] if start == len(parts) - 1 else name
    return name.lower().replace("-", "_")


def find_documents(
    roots: Mapping[str, Path], *, max_document_bytes: int, skipped: Counter[str]
) -> Iterator[Document]:
    """Every distinct text file under the roots, in sorted order; counts what is left out."""
    seen: set[str] = set()
    for root_name, root in roots.items():
        for file, parts in _files(root):
            try:
                if file.stat().st_size > max_document_bytes:
                    skipped["longer than the limit"] += 1
                    continue
                raw = file.read_bytes()
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                skipped["not UTF-8"] += 1
                continue
            except OSError:
                skipped["unreadable"] += 1
                continue
            digest = hashlib.sha256(raw).hexdigest()
            reason = _reason_to_skip(text, digest in seen)
            if reason:
                skipped[reason] += 1
                continue
            seen.add(digest)
            yield Document("/".join((root_name, *parts)), package_of(parts), text, digest)


def _files(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    for folder, subfolders, names in os.walk(root):  # does not follow links to folders
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            file = Path(folder, name)
            if (name.endswith(SUFFIXES) or name == "METADATA") and not file.is_symlink():
                yield file, file.relative_to(root).parts


def _reason_to_skip(text: str, known: bool) -> str | None:
    if len(text.strip()) < 64:
        return "shorter than 64 characters"
    if "\0" in text:
        return "NUL character"
    return "duplicate" if known else None


def hold_out(sizes: Mapping[str, int], share: float) -> set[str]:
    """Packages of the validation set: about `share` of the bytes, the same on every machine.

    Packages are visited in the order of a hash of their name; one that would overshoot the share
    is passed over. At least one package is held out and at least one is not.
    """
    if len(sizes) < 2:
        raise ValueError(f"{len(sizes)} packages found, at least 2 are needed to hold one out")
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    budget = share * sum(sizes.values())
    chosen: set[str] = set()
    for name in order:
        if sizes[name] <= budget:
            chosen.add(name)
            budget -= sizes[name]
    return chosen if 0 < len(chosen) < len(sizes) else {min(order, key=lambda name: sizes[name])}


def split_and_cap(
    documents: Sequence[Document], *, share: float, max_bytes: int
) -> dict[str, list[Document]]:
    """Train and validation documents, each in the order of a hash, cut where its budget ends."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for document in documents:
        sizes[document.package] += document.num_bytes
    held_out = hold_out(sizes, share)
    budgets = {"train": max_bytes * (1 - share), "valid": max_bytes * share}
    parts: dict[str, list[Document]] = {"train": [], "valid": []}
    for document in sorted(documents, key=lambda document: (document.sha256, document.path)):
        part = "valid" if document.package in held_out else "train"
        if document.num_bytes <= budgets[part]:
            parts[part].append(document)
            budgets[part] -= document.num_bytes
    for part, chosen in parts.items():
        if not chosen:
            raise ValueError(f"no {part} document fits max_bytes={max_bytes}; raise --max-mib")
    return parts


def write_corpus(
    parts: Mapping[str, Sequence[Document]], output: Path, facts: Mapping[str, Any]
) -> None:
    """Writes `train.jsonl`, `valid.jsonl` and `manifest.json`, each by rename."""
    output.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = dict(facts)
    for part, documents in parts.items():
        lines = "".join(
            json.dumps({"text": d.text, "path": d.path, "package": d.package}) + "\n"
            for d in documents
        )
        _replace(output / f"{part}.jsonl", lines)
        manifest[part] = {
            "documents": len(documents),
            "bytes": sum(d.num_bytes for d in documents),
            "packages": sorted({d.package for d in documents}),
            "files": [[d.path, d.sha256, d.num_bytes] for d in documents],
        }
    _replace(output / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def _replace(path: Path, content: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(path)


@answering("python_docs_corpus.py")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--max-mib", type=float, default=24.0, help="size of both parts together")
    parser.add_argument("--valid-share", type=float, default=0.05, help="of the bytes")
    parser.add_argument("--max-document-kib", type=int, default=1024, help="longer: left out")
    parser.add_argument("--root", type=Path, action="append", help="folders instead of Python's")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.valid_share < 1:
        parser.error(f"--valid-share {arguments.valid_share} must lie between 0 and 1")
    roots = {path.name: path for path in arguments.root} if arguments.root else default_roots()
    skipped: Counter[str] = Counter()
    limit = arguments.max_document_kib << 10
    documents = list(find_documents(roots, max_document_bytes=limit, skipped=skipped))
    max_bytes = int(arguments.max_mib * 2**20)
    parts = split_and_cap(documents, share=arguments.valid_share, max_bytes=max_bytes)
    facts = {"python": sys.version.split()[0], "skipped": dict(skipped)}
    write_corpus(parts, arguments.output, facts)
    for part, chosen in parts.items():
        mib = sum(d.num_bytes for d in chosen) / 2**20
        packages = len({d.package for d in chosen})
        print(f"{part}: {len(chosen)} documents of {packages} packages, {mib:.1f} MiB")
    print(
        "skipped: " + (", ".join(f"{n} {why}" for why, n in sorted(skipped.items())) or "nothing")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
