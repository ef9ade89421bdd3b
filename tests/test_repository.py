"""What must hold for the tree as a whole: imports, packaging, dangerous calls, sizes."""

import ast
import contextlib
import os
import pty
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import setuptools

from tests import durations

ROOT = Path(__file__).resolve().parent.parent

_IMPORT_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import {module}
assert sys.modules["torch"] is None
"""


@pytest.mark.parametrize("module", ["megatron_cp.mask", "megatron_cp.plan"])
def test_mask_and_plan_are_imported_without_torch(module):
    # Their time is measured by benchmarks/bench_import.py.
    subprocess.run(
        [sys.executable, "-c", _IMPORT_WITHOUT_TORCH.format(module=module)], check=True, cwd=ROOT
    )


def _tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _package_files() -> list[Path]:
    """Returns every Python file that gets installed, and the scripts beside it."""
    folders = ("megatron_cp", "models", "kernels", "tools")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*files, ROOT / "pretrain_gpt.py"] if (ROOT / "pretrain_gpt.py").is_file() else files


def _keyword(call: ast.Call, name: str) -> object:
    """Returns the literal given for a keyword, None if there is none or it is no literal."""
    values = [k.value for k in call.keywords if k.arg == name]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def _dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, what is wrong) for everything that can run text or bytes as code."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
            # Reading a pickle runs whatever its writer wished.
            if {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"} & set(names):
                yield node.lineno, "imports a pickle module"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        # Text from a file or a command line must never become code.
        if called in ("eval", "exec", "os.system", "os.popen"):
            yield node.lineno, f"calls {called}"
        # Without weights_only, a checkpoint is a pickle.
        if called == "torch.load" and _keyword(node, "weights_only") is not True:
            yield node.lineno, "torch.load without weights_only=True"
        # An .npy file with objects is a pickle.
        if _keyword(node, "allow_pickle") is True:
            yield node.lineno, "allow_pickle=True"
        # A path with a blank or a semicolon would be a command.
        if _keyword(node, "shell") is True:
            yield node.lineno, "shell=True"


# The one unpickler: it names what it builds (tests/training/test_checkpoint_damage.py tries to get past it).
_UNPICKLER = ROOT / "megatron_cp" / "mcore" / "checkpoint" / "safe_load.py"


def test_package_never_runs_data_as_code():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in _package_files()
        for line, what in _dangers(ast.parse(path.read_text(encoding="utf-8")))
        if (path, what) != (_UNPICKLER, "imports a pickle module")
    ]
    assert not found, "\n".join(found)


def test_the_one_unpickler_uses_of_pickle_only_what_it_narrows():
    tree = ast.parse(_UNPICKLER.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in nodes if ast.unparse(node.value) == "pickle"}
    assert used == {"_Unpickler", "BUILD", "UnpicklingError"}
    (narrowed,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "pickle._Unpickler" in map(ast.unparse, node.bases)
    )
    assert [item.name for item in narrowed.body if isinstance(item, ast.FunctionDef)] == [
        "load_build",
        "find_class",
    ]


def test_dangers_are_recognised():
    planted = (
        "import pickle\nfrom pickle import loads\neval('1')\ntorch.load(path)\n"
        "np.load(p, allow_pickle=True)\nsubprocess.run(c, shell=True)\n"
        "torch.load(path, weights_only=True)\nmodel.eval()\nnp.load(p, allow_pickle=False)\n"
    )
    assert sorted(line for line, _ in _dangers(ast.parse(planted))) == [1, 2, 3, 4, 5, 6]


def test_tracked_files_name_no_registry_and_no_path_of_one_machine():
    # Written in pieces, so that this file does not name them either.
    hosts = (
        "py" + "pi.org",
        "python" + "hosted.org",
        "download.py" + "torch.org",
        "arti" + "factory",
    )
    folders = ("wo" + "rk", "ro" + "ot", "ho" + r"me/\w+", "tmp/pl" + "an", "opt/py" + "pi")
    forbidden = re.compile(
        "|".join(re.escape(host) for host in hosts)
        + rf"|(?<![\w.$}}])/(?:{'|'.join(folders)})(?:/|\b)"
    )
    found = []
    for path in _tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # pictures
        name = path.relative_to(ROOT)
        found += [f"{name}:{i}: {x}" for i, x in enumerate(lines, 1) if forbidden.search(x)]
    assert not found, "\n".join(found)


def test_files_and_functions_are_within_their_limits():
    run = subprocess.run(
        [sys.executable, "tools/check_sizes.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_continuous_integration_tests_a_fresh_clone_called_megatron_cp(tmp_path):
    """With a `make` that only says where it is: the clone is the last commit, and nothing of it stays."""
    source, programs = tmp_path / "any name", tmp_path / "bin"
    (source / ".ci").mkdir(parents=True)
    programs.mkdir()
    shutil.copy(ROOT / ".ci" / "run", source / ".ci" / "run")
    (source / "committed").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(source)]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "First"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "checkout", "--quiet", "--detach"], check=True)  # as CI checks out
    (source / "not committed").write_text("")
    make = programs / "make"
    make.write_text('#!/bin/sh\necho "$@"; cd "$2"; pwd; ls; cat\n')
    make.chmod(0o755)
    run = subprocess.run(
        ["bash", str(source / ".ci" / "run")],
        env={"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    words, folder, *content = run.stdout.splitlines()
    assert Path(folder).name == "megatron_cp" and Path(folder).parent.parent == tmp_path
    assert words == f"-C {folder} test"
    assert content == ["committed"]
    assert "not committed are not tested" in run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["any name", "bin"]


def test_oversized_file_and_function_are_reported(tmp_path):
    (tmp_path / "tools").mkdir()
    docstring = '    """' + "\n" * 70 + '    """\n'
    short = f"def short():\n{docstring}    return 0\n"
    long = "def long():\n" + "    x = 0\n" * 60
    (tmp_path / "tools" / "a.py").write_text(short + long)
    (tmp_path / "tools" / "b.py").write_text("x = 0\n" * 401)
    run = subprocess.run(
        [sys.executable, "tools/check_sizes.py", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    first, second = run.stdout.splitlines()
    assert "a.py:74: long has 61 lines, allowed 60" in first
    assert "b.py: 401 lines, allowed 400" in second


def test_only_names_below_megatron_cp_are_installed(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    packages, folders = given["packages"], given["package_dir"]
    assert {name.split(".")[0] for name in packages} == {"megatron_cp"}
    assert len(packages) == len(set(packages))
    for name in packages:
        parent = next((p for p in folders if name == p or name.startswith(f"{p}.")), None)
        below = name.removeprefix(parent).strip(".") if parent else name
        folder = ROOT / folders.get(parent, "") / below.replace(".", "/")
        is_top = name in folders
        assert folder.is_dir() and (folder / "__init__.py").is_file() != is_top, f"{name}: {folder}"


@pytest.mark.parametrize("name", ["kernels", "models"])
def test_somebody_else_s_package_of_the_name_of_a_folder_is_found_from_the_root(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("theirs = True\n")
    command = f"import {name}; assert {name}.theirs"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", command], check=True, cwd=ROOT, env=environment)


def test_every_folder_of_the_package_with_code_is_installed(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {path.parent for path in (ROOT / "megatron_cp").rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    missing = {n for n in names if not n.startswith(("megatron_cp.models", "megatron_cp.kernels"))}
    missing -= set(given["packages"])
    assert not missing, f"without an __init__.py these are not installed: {sorted(missing)}"


@pytest.mark.parametrize("folder", ["models", "kernels"])
def test_folder_at_the_top_is_linked_into_the_package(folder):
    assert (ROOT / "megatron_cp" / folder).resolve() == ROOT / folder


def test_files_whose_durations_are_known_are_there():
    known = durations.known()
    names = {*known["files"], *(name.partition("::")[0] for name in known["slow"])}
    assert [name for name in sorted(names) if not (ROOT / name).is_file()] == []


# pretrain.py ends what setup.py starts.
_ENDED_ELSEWHERE = {"megatron_cp/training/setup.py"}


def test_every_program_and_page_that_starts_process_groups_ends_them():
    """Else a thread of gloo may free tensors while the interpreter ends, and the program aborts (docs/faq.md)."""
    pages = {".py", ".md", ".ipynb", ".sh"}
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in _tracked_files()
        if path.suffix in pages and path.relative_to(ROOT).parts[0] != "tests"
    }
    starting = {name for name, text in texts.items() if "init_process_group(" in text}
    open_ = {name for name in starting if "destroy_process_group(" not in texts[name]}
    assert len(starting) > 8 and open_ == _ENDED_ELSEWHERE


def _rest_of(terminal: int) -> str:
    """Returns what was written to a terminal that nobody writes to any more; it comes in pieces."""
    pieces = []
    with contextlib.suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as stream:
        while piece := stream.read(1 << 16):
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_install_steps_show_pips_progress_on_a_terminal_alone(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    words = ["make", "--dry-run", f"VENV={tmp_path / 'new'}", "pretrain"]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    piped = subprocess.run(words, cwd=ROOT, env=outer, capture_output=True, text=True, check=True)
    ours, theirs = pty.openpty()
    subprocess.run(words, cwd=ROOT, env=outer, stdout=theirs, check=True)
    os.close(theirs)
    shown = _rest_of(ours)
    for said, is_quiet in ((piped.stdout, True), (shown, False)):
        steps = [line for line in said.splitlines() if " -m pip install " in line]
        assert len(steps) == 2 and all(("--quiet" in step) == is_quiet for step in steps)
