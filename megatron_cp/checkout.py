"""Compares a Megatron-LM checkout with what our hooks need of it: `doctor --megatron CHECKOUT`.

The checkout is read, never imported: no GPU, no TransformerEngine and no matching Python are needed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from megatron_cp.doctor import Finding
from megatron_cp.mcore.versions.hook_points import (
    HOOK_POINTS,
    OLDEST,
    TESTED,
    HookPoint,
    Version,
    dotted,
    is_too_old,
    mismatch,
)

# A script that builds its batch with these gets its documents planned.
_BATCH_FUNCTIONS = ("get_batch_on_this_tp_rank", "get_batch_on_this_cp_rank")
_PACKAGE_INFO = "megatron/core/package_info.py"


def examine_checkout(root: Path) -> list[Finding]:
    """Returns what was found in the checkout; "fail" where training with our spec would not work there."""
    try:
        info = (root / _PACKAGE_INFO).read_text()
    except OSError:
        words = f"{root} is no Megatron-LM checkout: {_PACKAGE_INFO} is not there"
        return [Finding("Megatron-LM", "fail", words)]
    findings = [_judge_version(_version(info), _is_candidate(info))]
    findings += [_judge_point(root, point) for point in HOOK_POINTS]
    return [*findings, _judge_script(root), _judge_spec(root)]


def _version(info: str) -> Version:
    parts = [
        re.search(rf"^{name} *= *(\d+)", info, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")
    ]
    return tuple(int(part[1]) for part in parts if part is not None)


def _is_candidate(info: str) -> bool:
    return re.search(r"^PRE_RELEASE *= *'rc", info, re.MULTILINE) is not None


def _judge_version(version: Version, is_candidate: bool) -> Finding:
    if is_too_old(version, is_candidate):
        return Finding("Megatron-LM", "fail", f"{dotted(version)}; need {dotted(OLDEST)} or later")
    if version in TESTED:
        return Finding("Megatron-LM", "ok", f"{dotted(version)}, which was tested")
    return Finding("Megatron-LM", "note", f"{dotted(version)}; tested were {dotted(*TESTED)}")


def _judge_point(root: Path, point: HookPoint) -> Finding:
    for file in point.files:
        place = root / file
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found = _definition(path, point.name)
            if found is None:
                continue
            line, parameters = found
            lack = mismatch(point, parameters)
            where = f"{path.relative_to(root)}:{line}"
            return Finding(
                point.name, "fail" if lack else "ok", f"{where}; {lack}" if lack else where
            )
    if point.is_needed:
        return Finding(point.name, "fail", f"is not in {' or '.join(point.files)}")
    return Finding(point.name, "ok", "this version has none, and needs none")


def _definition(path: Path, name: str) -> tuple[int, list[str]] | None:
    """Returns (line, parameters) of a function, or of a method `Class.name`; None if the file has none."""
    tree = _parse(path)
    if tree is None:
        return None
    *owner, function = name.split(".")
    body: list[ast.stmt] = tree.body
    if owner:
        classes = [
            node for node in body if isinstance(node, ast.ClassDef) and node.name == owner[0]
        ]
        body = classes[0].body if classes else []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            return node.lineno, [argument.arg for argument in arguments]
    return None


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _judge_script(root: Path) -> Finding:
    tree = _parse(root / "pretrain_gpt.py")
    if tree is None:
        return Finding("pretrain_gpt.py", "fail", "cannot be read")
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    missing = [name for name in _BATCH_FUNCTIONS if name not in called]
    if missing:
        words = f"does not call {' and '.join(missing)}: its batches would come past the hooks"
        return Finding("pretrain_gpt.py", "fail", words)
    return Finding("pretrain_gpt.py", "ok", "makes its batches with the functions that get hooks")


def _judge_spec(root: Path) -> Finding:
    for name in ("gpt_builders.py", "pretrain_gpt.py"):
        path = root / name
        if path.is_file() and "import_module(args.spec)" in path.read_text():
            words = f"{name} takes it: --spec megatron_cp.mcore.spec gpt_layer_spec"
            return Finding("--spec", "ok", words)
    return Finding(
        "--spec", "fail", "neither gpt_builders.py nor pretrain_gpt.py imports args.spec"
    )
