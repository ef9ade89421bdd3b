"""`python -m megatron_cp emulate`: one case of the forward kernel, printed."""

import re

import pytest

from megatron_cp.__main__ import main
from megatron_cp.commands.emulate import KERNEL_SHAPES
from megatron_cp.kernels.emulator import library

SMALL = ["--seq-length", "140", "--num-query-groups", "1", "--kv-channels", "64"]
MASKS = {
    **{
        name: ["--mask", name]
        for name in (*KERNEL_SHAPES, "full", "causal", "documents", "mixed_document")
    },
    "a window": ["--mask", "causal", "--window-size", "30,0"],
    "a prefix": ["--mask", "prefix_lm_causal"],
    "documents of given lengths": ["--lengths", "1,60,79"],
}


def _emulate(capsys, *words):
    status = main(["emulate", *SMALL, *words])
    return status, capsys.readouterr()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_mask_prints_an_error_below_that_of_the_plain_formula(capsys, mask, dtype):
    status, printed = _emulate(capsys, *mask, "--dtype", dtype, "--seed", "3")
    assert status == 0 and "error" not in printed.err
    errors = re.search(
        r"out  max error against float64 (\S+), of the plain \w+ formula (\S+)", printed.out
    )
    assert float(errors[1]) <= float(errors[2])
    assert float(re.search(r"lse  max error against float64 (\S+)", printed.out)[1]) < 1e-5


def test_instructions_and_barriers_are_counted_as_executed(capsys, tmp_path):
    history = tmp_path / "history.txt"
    words = ["--mask", "full", "--blocks", "1", "--softcap", "5", "--history", str(history)]
    status, printed = _emulate(capsys, *words)
    assert status == 0
    # One query tile and two heads, two key tiles each, one panel of 64 columns: q, and k and v twice.
    of_queries, of_keys = 1 * 2, 1 * 2 * 2 * 2
    assert re.search(rf"\b{of_queries + of_keys}  cp\.async\.bulk\.tensor \(load\)", printed.out)
    # Per key tile 64 / 16 products for the scores and 96 / 16 for the output, by 384 threads.
    products = 1 * 2 * 2 * (64 // 16 + 96 // 16) * 384
    assert re.search(rf"\b{products:,}  wgmma\.mma_async", printed.out)
    events = history.read_text().splitlines()
    for num_bytes, copies in ((192 * 128, of_queries), (96 * 128, of_keys)):
        assert sum(f"receives {num_bytes} bytes" in event for event in events) == copies
    assert f"wrote {len(events):,} events" in printed.out


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)])
def test_head_dims_that_are_said_to_be_built_are(capsys, dims):
    words = ["--kv-channels", str(dims[0]), "--v-head-dim", str(dims[1]), "--seq-length", "20"]
    status, printed = _emulate(capsys, *words)
    assert status == 0 and f"head dim {dims[0]} ({dims[1]})" in printed.out


@pytest.mark.parametrize("mask", ["mixed_slices", "causal"])
def test_gradients_are_as_close_to_float64_as_the_plain_formula(capsys, mask):
    status, printed = _emulate(capsys, "--mask", mask, "--backward", "--seed", "2")
    assert status == 0
    for name in ("dq", "dk", "dv"):
        line = rf"{name}   max error against float64 (\S+), of the plain bf16 formula (\S+)"
        error, plain = (float(x) for x in re.search(line, printed.out).groups())
        assert 0 < error <= 2 * plain
    assert "cp.reduce.async.bulk.tensor" in printed.out


def test_a_defect_is_one_line_on_standard_error_and_exit_code_1(capsys, monkeypatch):
    def find(self, params, machine):
        raise library.EmulatorError("seed 1, block 0, deadlock")

    monkeypatch.setattr(library.Kernel, "run", find)
    status, printed = _emulate(capsys)
    assert status == 1 and printed.out == ""
    assert printed.err.endswith("\ndocuments: seed 1, block 0, deadlock\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--kv-channels", "80"],
            "--kv-channels 80 must be what a kernel is built for: --kv-channels 64, 96,",
        ),
        (["--v-head-dim", "128"], "64 --v-head-dim 128 must be what a kernel is built for"),
        (["--softcap", "nan"], "argument --softcap: 'nan' must be a number of at least 0"),
        (["--seq-length", "1M"], "2 heads of 1048576 x 1048576 scores are more than 268435456"),
        (["--history", "/"], "/: Is a directory"),
        (["--num-query-groups", "3"], "--num-query-groups 3 must divide --num-attention-heads 2"),
        (["--seq-length", "0"], "must be a whole number of at least 1"),
        (["--seed", "-1"], "must be a whole number of at least 0"),
        (["--mask", "round"], "mask='round' is unknown"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        main(["emulate", *SMALL, *words])
    printed = capsys.readouterr()
    (refusal,) = printed.err.splitlines()  # nothing was begun
    assert caught.value.code == 2 and "error: " in refusal and message in refusal
