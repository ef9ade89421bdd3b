"""Token files and checkpoints that cases of bad input name, made by hand."""

from pathlib import Path

from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.manifest import manifest_path


def write_corpus(
    prefix: Path,
    documents: list[list[int]],
    dtype: str = "uint16",
    facts: dict[str, object] | None = None,
) -> Path:
    """The prefix of a corpus; one without ``facts`` has no manifest, as Megatron's own tool leaves it."""
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for tokens in documents:
            writer.add_document(tokens)
        writer.finish(facts)
    if facts is None:
        manifest_path(prefix).unlink()
    return prefix


# Folders that are no checkpoint of this run: files and what they hold.
_DIST = {"metadata.json": '{"sharded_backend": "torch_dist"}', ".metadata": "", "common.pt": ""}
CHECKPOINTS: dict[str, dict[str, str]] = {
    "two-formats": {**_DIST, "mp_rank_00/model_optim_rng.pt": ""},
    "unfinished": {"__0_0.distcp": ""},
    "of-fsdp": {".metadata": ""},
    "zarr": {"metadata.json": '{"sharded_backend": "zarr"}'},
    "two-tensor-ranks": {"mp_rank_00/model_optim_rng.pt": "", "mp_rank_01/model_optim_rng.pt": ""},
    "two-stages": {
        "mp_rank_00_000/model_optim_rng.pt": "",
        "mp_rank_00_001/model_optim_rng.pt": "",
    },
    "half": {"mp_rank_00_001/model_optim_rng.pt": ""},
    "cut-manifest": {**_DIST, "megatron_cp.json": "{"},
}


def write_checkpoints(folder: Path) -> None:
    """The folders that cases of the program load, and a tracker that is none."""
    for name, files in CHECKPOINTS.items():
        for file, text in files.items():
            path = folder / name / "iter_0000005" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (folder / name / "latest_checkpointed_iteration.txt").write_text("5")


def write_corpora(folder: Path) -> None:
    """The corpora and checkpoints that cases of the program name."""
    write_checkpoints(folder / "checkpoints")
    good = [[(7 * i + j) % 512 for j in range(40 + i)] for i in range(40)]
    write_corpus(folder / "good", good)
    write_corpus(folder / "other", good[::-1])
    made_by = {"tokenizer": {"vocab_size": 512, "class": "HuggingFaceTokenizer"}, "eod": 0}
    write_corpus(folder / "of-another-tokenizer", good, facts=made_by)
    write_corpus(folder / "large-ids", [[*tokens, 600] for tokens in good])
    write_corpus(folder / "empty", [[], [], []])
    write_corpus(folder / "single-tokens", [[token] for token in range(300)])
    short = write_corpus(folder / "short", good)
    Path(f"{short}.bin").write_bytes(Path(f"{short}.bin").read_bytes()[:-10])
