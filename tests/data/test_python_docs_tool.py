"""tools/python_docs_corpus.py: distinct documents, held out by package, the same every time."""

import json

import pytest

from tools import python_docs_corpus as tool


def make_tree(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def filler(name, lines=8):
    return "".join(f"# {name} line {i} of a document that is long enough\n" for i in range(lines))


@pytest.fixture
def tree(tmp_path):
    files = {f"pkg{i}/part{j}.py": filler(f"{i}.{j}", 5 + i) for i in range(12) for j in range(4)}
    files |= {
        "pkg1/copy.py": filler("0.0", 5),  # equals pkg0/part0.py
        "pkg2/__pycache__/x.py": filler("cache"),
        "pkg2/short.py": "# short\n",
        "pkg2/latin.py": b"# caf\xe9 " + b"x" * 100,
        "pkg2/zero.py": "# a\0b" + "x" * 100,
        "pkg2/data.bin": filler("binary"),
        "pkg0/_vendor/rich/text.py": filler("vendored"),
    }
    return make_tree(tmp_path / "tree", files)


def build(tree, output, *extra):
    assert tool.main(["--root", str(tree), "--output", str(output), *extra]) == 0
    lines = {p: (output / f"{p}.jsonl").read_text().splitlines() for p in ("train", "valid")}
    return {part: [json.loads(line) for line in rows] for part, rows in lines.items()}


def test_train_and_held_out_share_no_package(tree, tmp_path):
    parts = build(tree, tmp_path / "out", "--valid-share", "0.2")
    packages = {part: {d["package"] for d in rows} for part, rows in parts.items()}
    assert packages["train"] and packages["valid"]
    assert not packages["train"] & packages["valid"]
    assert packages["train"] | packages["valid"] == {f"pkg{i}" for i in range(12)} | {"rich"}
    texts = [d["text"] for rows in parts.values() for d in rows]
    assert len(texts) == len(set(texts)) == 12 * 4 + 1
    size = {part: sum(len(d["text"]) for d in rows) for part, rows in parts.items()}
    assert 0.05 < size["valid"] / sum(size.values()) <= 0.2


def test_the_corpus_is_the_same_every_time_and_the_manifest_tells_what_is_in_it(tree, tmp_path):
    build(tree, tmp_path / "a")
    build(tree, tmp_path / "b")
    for name in ("train.jsonl", "valid.jsonl", "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    files = [row for part in ("train", "valid") for row in manifest[part]["files"]]
    for path, sha256, size in files:
        content = (tree.parent / path).read_bytes()
        assert (len(content), tool.hashlib.sha256(content).hexdigest()) == (size, sha256)
    assert manifest["skipped"] == {
        "duplicate": 1,
        "shorter than 64 characters": 1,
        "not UTF-8": 1,
        "NUL character": 1,
    }


def test_the_cap_holds_for_both_parts_together(tree, tmp_path):
    parts = build(tree, tmp_path / "out", "--max-mib", "0.01", "--valid-share", "0.3")
    assert sum(len(d["text"]) for rows in parts.values() for d in rows) <= 0.01 * 2**20


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("json/decoder.py", "json"),
        ("this.py", "this"),
        ("pip/_vendor/rich/text.py", "rich"),
        ("wandb/vendor/__init__.py", "wandb"),
        ("pkg/_vendor/typing_extensions.py", "typing_extensions"),
        ("numpy-2.1.0.dist-info/METADATA", "numpy"),
        ("importlib_metadata-8.0.dist-info/METADATA", "importlib_metadata"),
        ("pydantic_core-2.0.dist-info/licenses/LICENSE.txt", "pydantic_core"),
        ("Markdown_It/README.md", "markdown_it"),
    ],
)
def test_a_file_belongs_to_its_package_also_when_vendored(path, package):
    assert tool.package_of(path.split("/")) == package


def test_too_little_to_split_is_an_error(tmp_path, capsys):
    tree = make_tree(tmp_path / "tree", {"only/one.py": filler("one")})
    with pytest.raises(SystemExit, match="2"):
        tool.main(["--root", str(tree), "--output", str(tmp_path / "out")])
    assert "at least 2 are needed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_roots_of_this_python_hold_its_standard_library():
    roots = tool.default_roots()
    assert (roots["stdlib"] / "json" / "decoder.py").is_file()
