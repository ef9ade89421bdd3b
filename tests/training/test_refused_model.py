"""A model that Megatron-Core refuses is one line that names the flags, on every rank, before a process group."""

import pytest

from megatron_cp.training.refused_model import built
from tests.training.commands import SMALL_RUN, stopped

WIDE = {"num_experts": 4, "qk_clip": True, "mtp_num_layers": None, "lr": 0.1, "rank": 0}


def _refuses(arguments):
    """Stands for Megatron-Core: it wants neither beside the other, and speaks of neither."""
    if arguments["num_experts"] is not None and arguments["qk_clip"]:
        raise ValueError("these do not go together.")
    return arguments["num_experts"]


def test_the_flags_without_which_there_is_no_refusal_are_named():
    with pytest.raises(ValueError, match="refuses") as refusal:
        built(_refuses, WIDE)
    assert str(refusal.value) == (
        "Megatron-Core refuses --num-experts 4, --qk-clip: these do not go together; change or leave out one of them"
    )


def test_what_is_not_refused_is_given_back():
    assert built(_refuses, {**WIDE, "qk_clip": False}) == 4


def test_a_refusal_that_hangs_on_no_flag_names_none():
    def refuses(arguments):
        raise AssertionError

    with pytest.raises(ValueError, match="refuses") as refusal:
        built(refuses, WIDE)
    assert str(refusal.value) == "Megatron-Core refuses this model: raise AssertionError"


def test_a_flag_that_is_refused_for_another_reason_by_itself_is_named():
    """Of two faults the first is told, and the second behind it is no reason to keep the first back."""

    def refuses(arguments):
        if arguments["qk_clip"]:
            raise ValueError("no clip")
        raise ValueError("no experts")

    with pytest.raises(ValueError, match=r"refuses --qk-clip: no clip; change it or leave it out$"):
        built(refuses, WIDE)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--moe-enable-deepep", "--moe-enable-deepep"),
        ("--fp8-param-gather", "--fp8-param-gather"),
        ("--num-experts 4 --moe-router-topk 1", "--moe-router-topk 1"),
        ("--moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity"),
    ],
)
def test_every_rank_refuses_what_megatron_core_does(flags: str, named: str):
    assert f"Megatron-Core refuses {named}: " in stopped(2, *SMALL_RUN, *flags.split())


def test_latent_attention_that_megatron_core_refuses_is_named():
    flags = [word for word in SMALL_RUN if word != "--group-query-attention"]
    line = stopped(1, *flags, "--multi-latent-attention", "--qk-l2-norm")
    assert "Megatron-Core refuses --multi-latent-attention, --qk-l2-norm: " in line
