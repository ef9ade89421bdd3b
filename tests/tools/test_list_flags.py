"""The page of flags is what the program does with them."""

from megatron_cp.training.arguments import judge_arguments
from megatron_cp.training.arguments.megatron_names import MEGATRON_NAMES
from tests.training.commands import SMALL_RUN
from tools import list_flags


def test_the_published_page_is_current():
    assert list_flags.PAGE.read_text() == list_flags.page(), "run: python tools/list_flags.py"


def test_every_known_flag_has_one_row_sorted_by_name():
    flags = [flag for flag, _, _ in list_flags.rows()]
    assert flags == sorted(flags, key=str.lower)
    assert {flag.removeprefix("--") for flag in flags} == MEGATRON_NAMES
    assert len(set(flags)) == len(flags)


def test_what_the_page_calls_refused_is_refused_and_nothing_else_is():
    table = list_flags.rows()
    refused = {flag for flag, kind, _ in table if kind == "refused"}
    _, reasons = judge_arguments(
        [*SMALL_RUN, *(flag for flag, _, _ in table if flag in refused)], {}
    )
    by_name = {line.split()[0] for line in reasons if "is an argument of Megatron-LM" in line}
    assert by_name == refused


def test_flags_that_single_versions_have_are_known_by_what_they_do():
    """Each is in the parser of one release: 0.16.1 or 0.20.0."""
    told = {flag: (kind, why) for flag, kind, why in list_flags.rows()}
    for flag, kind, advice in (
        ("--muon-use-nesterov", "refused", "use --muon-nesterov"),
        ("--disable-ckpt-fully-parallel-save", "refused", "use --no-ckpt-fully-parallel-save"),
        ("--legacy-tokenizer", "refused", "--tokenizer-type"),
        ("--no-scatter-gather-tensors-in-pipeline", "noted", "ranks send"),
        ("--enable-mhc-connections", "refused", "ours does not stand for"),
        ("--mhc-num-residual-streams", "refused", "ours does not stand for"),
        ("--mtp-hsm", "refused", "of multi-token prediction"),
        ("--output-logit-dtype", "refused", "results without it may differ"),
        ("--moe-dispatch-fwd-dtype", "refused", "of experts"),
        ("--otel-enabled", "refused", "leave it out: results stay the same"),
        ("--no-save-tokenizer-assets", "noted", "beside checkpoints"),
    ):
        assert told[flag][0] == kind and advice in told[flag][1], (flag, told[flag])
