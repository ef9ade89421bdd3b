"""Flags of Megatron-LM that change nothing here are taken with a note; those that cannot be served say why."""

import importlib.util
import re
from pathlib import Path

from megatron_cp.training.arguments import build_parser, known_flags
from tests.training.commands import SMALL_RUN
from tests.training.verdicts import parse, refusal


def test_flags_that_change_nothing_are_noted_and_their_values_taken():
    flags = ["--use-mcore-models", "--attention-backend", "fused", "--data-cache-path=/x"]
    args = parse(*flags, *SMALL_RUN)
    assert [note.split()[0] for note in args.notes] == [
        "--use-mcore-models",
        "--attention-backend",
        "--data-cache-path",
    ]


def test_a_noted_flag_takes_its_values_and_no_word_more(capsys):
    groups = ["--high-priority-stream-groups", "tp", "dp"]
    assert len(parse(*SMALL_RUN, *groups, "--logging-level", "40").notes) == 2
    assert "'stray'" in refusal(capsys, *SMALL_RUN, "--async-save", "stray")
    assert "expects 1 value" in refusal(capsys, *SMALL_RUN, "--logging-level", "--async-save")


def test_only_flags_of_megatron_are_noted_and_none_that_is_served_too():
    served = {name for action in build_parser()._actions for name in action.option_strings}
    names = set(known_flags.NOTED)
    assert not names & served
    assert {name.removeprefix("--") for name in names} <= known_flags.MEGATRON_NAMES


def test_the_loss_in_float16_is_noted_as_nothing_in_megatron_core_reads_it():
    (note,) = parse(*SMALL_RUN, "--fp16", "--fp16-lm-cross-entropy").notes
    assert note.startswith("--fp16-lm-cross-entropy changes nothing here: Megatron-Core reads it")
    (core,) = importlib.util.find_spec("megatron.core").submodule_search_locations
    texts = [path.read_text(encoding="utf-8") for path in Path(core, "models").rglob("*.py")]
    uses = [use for text in texts for use in re.findall(r"\.fp16_lm_cross_entropy\b.*", text)]
    assert uses and set(uses) == {".fp16_lm_cross_entropy = fp16_lm_cross_entropy"}


def test_openais_gelu_is_noted_as_nothing_in_megatron_core_reads_it():
    (note,) = parse(*SMALL_RUN, "--openai-gelu").notes
    assert note.startswith("--openai-gelu changes nothing here: Megatron-LM reads it nowhere")
    (core,) = importlib.util.find_spec("megatron.core").submodule_search_locations
    texts = [path.read_text(encoding="utf-8") for path in Path(core).rglob("*.py")]
    assert sum("def openai_gelu" in text for text in texts) == 1
    assert not [text for text in texts if ".openai_gelu" in text]


def test_code_of_strangers_is_refused_with_a_reason_of_its_own(capsys):
    line = refusal(capsys, *SMALL_RUN, "--trust-remote-code")
    assert "a tokenizer would run code that comes with it; tokenizers are read from files" in line
