"""`doctor --megatron`: what is read from a checkout, on trees written here."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cp.__main__ import main

OLD = {
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 16\nPATCH = 1\n",
    "megatron/core/utils.py": (
        "def get_batch_on_this_cp_rank(batch, cp_group=None): ...\n"
        "def get_thd_batch_on_this_cp_rank(batch, cu_seqlens, cu_seqlens_padded, max_seqlen): ...\n"
    ),
    "megatron/training/utils.py": (
        "def get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=False): ...\n"
        "def is_first_or_last_pipeline_stage(vp_stage): ...\n"
    ),
    "megatron/core/pipeline_parallel/schedules.py": (
        "def forward_step_calc_loss(model, output_tensor, loss_func, config): ...\n"
    ),
    "megatron/core/models/gpt/gpt_model.py": (
        "class GPTModel:\n"
        "    def __init__(self, config, transformer_layer_spec, vocab_size): ...\n"
        "    def forward(self, input_ids, position_ids, attention_mask, labels=None, *, packed_seq_params=None): ...\n"
    ),
    "megatron/core/transformer/transformer_block.py": (
        "class TransformerBlock:\n    def __init__(self, config, spec, post_layer_norm=True): ...\n"
    ),
    "gpt_builders.py": "spec = import_module(args.spec)\n",
    "pretrain_gpt.py": "get_batch_on_this_tp_rank(1)\nget_batch_on_this_cp_rank(2)\n",
}


def tree(folder: Path, **changes: str | None) -> Path:
    files = OLD | {name: text for name, text in changes.items() if text is not None}
    for name, text in files.items():
        if changes.get(name, "") is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def test_a_checkout_that_fits_is_said_to_fit_with_the_line_of_each_function(tmp_path, capsys):
    assert main(["doctor", "--megatron", str(tree(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "0.16.1, which was tested" in out
    assert "megatron/training/utils.py:2" in out  # is_first_or_last_pipeline_stage
    assert out.endswith("our hooks fit this checkout\n")


def test_functions_are_found_where_newer_versions_have_them(tmp_path, capsys):
    newer = tree(
        tmp_path,
        **{
            "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 99\nPATCH = 0\n",
            "megatron/training/utils.py": None,
            "megatron/training/utils/common_utils.py": (
                "def is_first_or_last_pipeline_stage(vp_stage): ...\n"
            ),
            "megatron/core/utils.py": (
                "def get_batch_on_this_tp_rank(batch, *, tp_rank): ...\n\n"
                "def get_batch_on_this_cp_rank(batch, is_hybrid_cp, cp_group=None): ...\n"
            ),
        },
    )
    assert main(["doctor", "--megatron", str(newer)]) == 0
    out = capsys.readouterr().out
    assert "0.99.0; tested were 0.16.1, " in out
    assert "megatron/core/utils.py:3" in out and "utils/common_utils.py:1" in out
    assert "this version has none, and needs none" in out


def test_a_checkout_between_releases_is_judged_by_its_functions(tmp_path, capsys):
    """slime's Megatron-LM calls itself so, and is newer than 0.16.0."""
    candidate = "MAJOR = 0\nMINOR = 16\nPATCH = 0\nPRE_RELEASE = 'rc0'\n"
    root = tree(tmp_path, **{"megatron/core/package_info.py": candidate})
    assert main(["doctor", "--megatron", str(root)]) == 0
    assert "0.16.0; tested were 0.16.1, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("megatron/core/package_info.py", None, "is no Megatron-LM checkout"),
        ("megatron/core/package_info.py", "MAJOR = 0\nMINOR = 12\nPATCH = 3\n", "need 0.16.1"),
        (
            "megatron/core/utils.py",
            "def get_batch_on_this_cp_rank(batch): ...",
            "no parameter cp_group",
        ),
        (
            "megatron/core/utils.py",
            "def get_batch_on_this_cp_rank(x, cp_group): ...",
            "parameter is x",
        ),
        ("megatron/core/utils.py", "def broken(:", "is not in megatron/core/utils.py"),
        ("megatron/training/utils.py", "", "get_batch_on_this_tp_rank        is not in"),
        ("megatron/core/models/gpt/gpt_model.py", "class GPTModel: ...", "GPTModel.forward"),
        (
            "megatron/core/transformer/transformer_block.py",
            "class TransformerBlock:\n    def __init__(self, config, layers): ...\n",
            "it has no parameter spec",
        ),
        ("pretrain_gpt.py", "get_batch_on_this_tp_rank(1)", "come past the hooks"),
        ("pretrain_gpt.py", None, "cannot be read"),
        ("gpt_builders.py", "spec = None", "imports args.spec"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, capsys, file, text, expected):
    assert main(["doctor", "--megatron", str(tree(tmp_path, **{file: text}))]) == 1
    out = capsys.readouterr().out
    assert expected in out and "NO  " in out
    assert out.endswith("our hooks do not fit this checkout\n")


def test_nothing_of_the_checkout_is_run(tmp_path):
    bomb = "raise SystemExit('imported')\n"
    folder = tree(tmp_path, **{name: bomb + text for name, text in OLD.items()})
    done = subprocess.run(
        [sys.executable, "-m", "megatron_cp", "doctor", "--megatron", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
