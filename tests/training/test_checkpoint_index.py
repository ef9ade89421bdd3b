"""What is read of a checkpoint without being believed: the index, the ends of files, every other pickle."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_cp.errors import DamagedCheckpointError
from megatron_cp.mcore.checkpoint import safe_load
from megatron_cp.training.checkpoint import places

PLACE = "torch.distributed.checkpoint.metadata"


def index_of(pieces: dict[str, list[tuple[str, int, int]]]) -> Metadata:
    """An index of tensors of ten numbers, whose pieces lie in (file, offset, length)."""
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(torch.float32, memory_format=torch.contiguous_format),
            torch.Size([len(places), 10]),
            [ChunkStorageMetadata(torch.Size([i, 0]), torch.Size([1, 10])) for i in range(len(places))],
        )
        for name, places in pieces.items()
    }  # fmt: skip
    storage = {
        MetadataIndex(name, torch.Size([i, 0]), i): _StorageInfo(*place)
        for name, places in pieces.items()
        for i, place in enumerate(places)
    }
    return Metadata(tensors, None, storage)


def written(folder: Path, content: bytes) -> Path:
    (folder / ".metadata").write_bytes(content)
    return folder / ".metadata"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_index_is_read_as_it_was_pickled(tmp_path, protocol: int):
    index = index_of({"a": [("x", 0, 40), ("y", 0, 40)], "b": [("x", 40, 40)]})
    found = safe_load.read_index(written(tmp_path, pickle.dumps(index, protocol)))
    assert found == index
    properties = found.state_dict_metadata["a"].properties
    assert (properties.dtype, properties.memory_format) == (torch.float32, torch.contiguous_format)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


_STATE = b"}X\x08\x00\x00\x00poisonedK\x01s"  # {"poisoned": 1}
SLOTS, ATTRIBUTES = b"N" + _STATE + b"\x86b.", _STATE + b"b."
SHARED = {
    "a type": (named(PLACE, "MetadataIndex"), metadata.MetadataIndex),
    "a function": (named("torch.serialization", "_get_layout"), torch.serialization._get_layout),
    "a member": (
        named(PLACE, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R",
        metadata._MEM_FORMAT_ENCODING(0),
    ),
}


@pytest.mark.parametrize("state", [SLOTS, ATTRIBUTES])
@pytest.mark.parametrize("shared", SHARED)
def test_an_index_changes_nothing_of_the_process(tmp_path, shared: str, state: bytes):
    build, target = SHARED[shared]
    with pytest.raises(safe_load.ForeignCodeError, match="to change it"):
        safe_load.read_index(written(tmp_path, b"\x80\x02" + build + state))
    assert not hasattr(target, "poisoned")


def counted_parses(monkeypatch) -> list[Path]:
    """The files that are parsed from now on."""
    parsed, parse = [], safe_load._parse_index
    monkeypatch.setattr(safe_load, "_parse_index", lambda path: parsed.append(path) or parse(path))
    return parsed


def test_an_index_is_parsed_once_whoever_asks_for_it_in_a_load(tmp_path, monkeypatch):
    path = written(tmp_path, pickle.dumps(checkpoint_of(tmp_path)))
    parsed = counted_parses(monkeypatch)
    with safe_load.parsing_each_index_once(), safe_load.reading_safely():
        places.check_reach(tmp_path)
        kept = safe_load.read_index(path)
        reader = FileSystemReader(tmp_path)
        of_torch = reader.read_metadata()
        assert parsed == [path]
        assert of_torch.storage_meta.load_id == reader.load_id and kept.storage_meta is None
        assert of_torch.storage_data == kept.storage_data == checkpoint_of(tmp_path).storage_data
    assert safe_load.read_index(path) == kept and len(parsed) == 2  # nothing is kept behind a load


def test_an_index_that_is_another_file_by_now_is_parsed_and_checked_again(tmp_path):
    content = pickle.dumps(index_of({"a": [("x", 0, 40)]}))
    path = written(tmp_path, content)
    outside = pickle.dumps(index_of({"a": [("/", 0, 40)]}))
    assert len(outside) == len(content)
    with safe_load.parsing_each_index_once():
        before = path.stat()
        safe_load.read_index(path)
        (tmp_path / "other").write_bytes(outside)  # as long, of the same time, in its place
        os.utime(tmp_path / "other", ns=(before.st_atime_ns, before.st_mtime_ns))
        (tmp_path / "other").replace(path)
        with pytest.raises(safe_load.ForeignCodeError, match="points at the file"):
            safe_load.read_index(path)
        with pytest.raises(safe_load.ForeignCodeError, match="points at the file"):
            safe_load.read_index(path)
        path.unlink()
        with pytest.raises(DamagedCheckpointError, match="cannot be read"):
            safe_load.read_index(path)


class Command:
    """Makes a file when it is unpickled the ordinary way."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_an_index_names_what_indices_are_made_of_and_nothing_else(tmp_path):
    content = pickle.dumps(Command(tmp_path / "executed"))
    with pytest.raises(safe_load.ForeignCodeError, match="names posix mkdir"):
        safe_load.read_index(written(tmp_path, content))
    assert not (tmp_path / "executed").exists()


def test_while_a_checkpoint_is_read_torch_executes_nothing_whoever_asks_for_it(tmp_path):
    torch.save(Command(tmp_path / "executed"), tmp_path / "file.pt")
    before = dict(os.environ)
    with safe_load.reading_safely(), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "file.pt", weights_only=False)
    assert not (tmp_path / "executed").exists()
    assert dict(os.environ) == before


def checkpoint_of(folder: Path) -> Metadata:
    """The files of a checkpoint whose index reaches exactly to their ends."""
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({}, folder / "common.pt")
    (folder / "__0_0.distcp").write_bytes(bytes(80))
    (folder / "__1_0.distcp").write_bytes(bytes(40))
    return index_of(
        {
            "a": [("__0_0.distcp", 0, 40), ("__1_0.distcp", 0, 40)],
            "b": [("__0_0.distcp", 40, 40)],
        }
    )


def test_files_that_reach_as_far_as_the_index_says_are_whole_and_longer_ones_too(tmp_path):
    written(tmp_path, pickle.dumps(checkpoint_of(tmp_path)))
    places.check_reach(tmp_path)
    (tmp_path / "__1_0.distcp").write_bytes(bytes(41))
    places.check_reach(tmp_path)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"])
def test_a_file_that_is_one_byte_short_is_named_with_both_lengths(tmp_path, name: str):
    written(tmp_path, pickle.dumps(checkpoint_of(tmp_path)))
    size = (tmp_path / name).stat().st_size
    (tmp_path / name).write_bytes(bytes(size - 1))
    with pytest.raises(DamagedCheckpointError, match=rf"{name} is {size - 1} bytes.*names {size}"):
        places.check_reach(tmp_path)


@pytest.mark.parametrize("place", [None, "x", _StorageInfo("__0_0.distcp", None, 1)])
def test_an_index_with_a_piece_that_is_nowhere_is_damaged(tmp_path, place):
    index = checkpoint_of(tmp_path)
    first = next(iter(index.storage_data))
    index.storage_data[first] = place
    written(tmp_path, pickle.dumps(index))
    with pytest.raises(ValueError, match=r"without its place|points at the file"):
        places.check_reach(tmp_path)
