"""LongRoPE's flags: all four or none, one factor for each frequency, and a note that says which list a run takes."""

import pytest

from tests.training.commands import SMALL_RUN
from tests.training.verdicts import parse, refusal, refusals


def longrope(*, limit: int = 128) -> list[str]:
    ones = ["1.5"] * (parse(*SMALL_RUN).kv_channels // 2)
    return [
        *("--longrope-short-factors", *ones, "--longrope-long-factors", *ones),
        *("--longrope-original-max-position-embeddings", str(limit)),
        *("--longrope-attention-factor", "1.2"),
    ]


@pytest.mark.parametrize(("more", "kind"), [(0, "short"), (-1, "long")])
def test_a_note_says_which_factors_a_run_takes(more: int, kind: str):
    limit = parse(*SMALL_RUN).seq_length + more
    notes = parse(*SMALL_RUN, *longrope(limit=limit)).notes
    assert [note.startswith(f"LongRoPE takes its {kind} factors") for note in notes] == [True]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--position-embedding-type none", "with --position-embedding-type none is not served"),
        ("--use-rope-scaling", "with --use-rope-scaling is not served"),
        ("--rotary-seq-len-interpolation-factor 2", "with --rotary-seq-len-interpolation-factor"),
        ("--rotary-percent 0.5", "positive numbers, one for each frequency of a head of"),
        ("--longrope-short-factors 1 2", "--longrope-short-factors of 2 must be"),
    ],
)
def test_what_longrope_does_not_go_with_is_named(capsys, flags: str, named: str):
    lines = refusals(capsys, *SMALL_RUN, *longrope(), *flags.split())
    assert [line for line in lines if named in line]


def test_a_part_of_longrope_is_refused(capsys):
    line = refusal(capsys, *SMALL_RUN, "--longrope-attention-factor", "1.2")
    assert "--longrope-attention-factor needs --longrope-short-factors, --longrope-long-" in line
