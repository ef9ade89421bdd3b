"""Only what is known to be harmless is written down."""

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.loggable_text import REMOVED, is_url, without_secrets
from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.logging.lines import print_rank_0
from megatron_cp.training.logging.loggable import (
    loggable,
    loggable_arguments,
    loggable_command,
)
from tests.training.commands import DATA, MODEL, SMALL_RUN, STEPS

SECRET = "hunter2PLANTED"
NAMES = shlex.split(
    "api_key HF_TOKEN wandb-api-key dbPassword secret aws_secret_access_key credentials AuthToken passwd keys "
    "access.key auth hf_auth authorization bearer passphrase pwd pat apikey signature sig session_cookie dsn "
    "connection_string webhook anything"
)
VALUES = [
    "https://bucket.s3.amazonaws.com/x?X-Amz-Signature=0123456789abcdef",
    "https://host/x?sv=2024&sig=abc%2Bdef",
    f"https://user:{SECRET}@host/path",
    f"https://{SECRET}@host/path",
    f"postgres://user:{SECRET}/slash@host/db",
    f"user:{SECRET}@host/x",
    f"Bearer {SECRET}",
    f"Authorization: Basic {SECRET}",
    f"Token {SECRET}",
    "hf_abcdefghijKLMNOPqrst",
    "sk-proj_abcdefgh",
    "sk-ant-api03-abcdEFGH",
    "xoxb-1234-5678-abcdefghijkl",
    "run-hf_AbCdEfGhIjKlMnOp",
    "/data/corpus-hf_abcdefghijklmnop",
    "run.sk-ant-api03-abcdEFGH_2",
    "exp_glpat-abc_def-123/x",
    "copy2AKIAIOSFODNN7EXAMPLE",
    "ghp_abcdefgh12345678",
    "AKIAIOSFODNN7EXAMPLE",
    "eyJhbGciOiJIUzI1NiJ9.e30.sig",
    "0123456789abcdef0123456789abcdef01234567",  # wandb's
    f"password={SECRET}",
    f'{{"token": "{SECRET}"}}',
    f"$({SECRET})",
    f"line\n{SECRET}",
]


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_that_is_not_ours_is_left_out_whatever_its_name(name: str):
    assert loggable_arguments({name: SECRET, "hidden_size": 64}) == {"hidden_size": 64}
    assert SECRET not in " ".join(
        loggable_command(["train.py", f"--{name}", SECRET, f"--{name}={SECRET}"])
    )


@pytest.mark.parametrize("value", VALUES)
def test_text_of_another_form_is_removed_wherever_it_stands(value: str):
    assert loggable(value) == REMOVED or (
        REMOVED in loggable(value) and value not in loggable(value)
    )
    for shown in (
        loggable({"a": [value]}),
        loggable_arguments({"data_path": [value], "load": value}),
        loggable_command(["train.py", "--load", value, f"--save={value}"]),
    ):
        text = json.dumps(shown)
        assert json.dumps(value).strip('"') not in text
        assert SECRET not in text


@pytest.mark.parametrize(
    "words",
    [
        ["--token", "--x", SECRET],
        ["--header", f"Authorization: {SECRET}"],
        ["--api-key", SECRET, "--x"],
        [f"PASSWORD={SECRET}", "run"],
        [SECRET],
        ["--one-logger-project", SECRET],
    ],
    ids=str,
)
def test_what_stands_behind_a_word_that_is_not_ours_is_removed(words):
    assert SECRET not in " ".join(loggable_command(["train.py", *words]))


def test_a_key_in_a_path_takes_its_own_part_along():
    path = "/data/0123456789abcdef0123456789abcdef01234567/corpus_text_document"
    assert loggable(path) == f"/data/{REMOVED}/corpus_text_document"


@pytest.mark.parametrize(
    "name",
    [
        "/data/wiki_sk_text_document", "opus-sk-en-parallel", "wiki-sk-20241101", "/models/Llama-2-7b-hf",
        "Llama-2-7b-hf-tokenizer", "corpus-hf_tokenized", "risk_assessments2024", "disk-abcdefghijklmnop",
        "code-npm-packages", "math-rk_text_document", "runs/2024-11-26_cp8",
    ],
)  # fmt: skip
def test_names_in_which_the_letters_of_keys_stand_are_kept(name: str):
    assert loggable(name) == name


def test_a_long_part_is_looked_through_in_time_that_grows_with_it():
    assert loggable("sk-" * 50_000) == "sk-" * 50_000


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"data path 'https://u:{SECRET}@h/x?sig=abc': https://u:{SECRET}@h/x?sig=abc.idx is not there; give one",
         f"data path '{REMOVED}': {REMOVED} is not there; give one"),
        (f"--load https:/u:{SECRET}@h/x holds nothing", f"--load {REMOVED} holds nothing"),
        (f"/here/s3://{SECRET}@h/x: no", f"/here/{REMOVED}: no"),
        (f"a 'pp://u:{SECRET} \"'@h/x', b", f"a '{REMOVED}', b"),
        (f"a https://h/x?token={SECRET}; b", f"a {REMOVED}; b"),
        ("see https://h.org/x.html, then y", "see https://h.org/x.html, then y"),
        ("/data/a:b/c of 1 x 2: cp_size=2 (nearest) or a@b", "/data/a:b/c of 1 x 2: cp_size=2 (nearest) or a@b"),
    ],
)  # fmt: skip
def test_of_a_line_that_is_said_the_urls_with_secrets_are_removed(line: str, shown: str):
    assert without_secrets(line) == shown


@given(st.text("ab:/.@'\" ;", max_size=40))
def test_lines_without_a_url_are_said_as_they_are(line: str):
    if ":/" not in line:
        assert without_secrets(line) == line
    assert not is_url(f"/{line}") and not is_url(f"./{line}")


def test_what_is_said_moves_no_cursor(capsys):
    """A file of a corpus or a tokenizer says names that go to the terminal."""
    name = "GPT\x1b[2J\x9b31m\r\x07\tü"
    shown = r"GPT\x1b[2J\x9b31m\r\x07" + "\tü"
    print_rank_0(f"a note on {name}\nin two lines")
    assert capsys.readouterr().out == f"a note on {shown}\nin two lines\n"
    assert without_secrets(f"refused: {name}") == f"refused: {shown}"


def test_every_argument_of_a_run_is_written_down_as_it_is():
    more = [
        "--data-path",
        "0.3",
        "/data/a-1.0/b_text_document",
        "0.7",
        "~/c",
        "--pipeline-model-parallel-layout",
    ]
    arguments = dict(parse_arguments(SMALL_RUN).arguments)
    plain = json.loads(json.dumps(arguments, default=str))
    assert loggable_arguments(arguments) == plain
    words = ["pretrain_gpt.py", *MODEL, *DATA, *STEPS, *more, "Et*3|(tt|)*2mL", "--no-wandb"]
    assert loggable_command(words) == words
    assert loggable_command(["a.py", "--lr=1e-3"]) == ["a.py", "--lr=1e-3"]


def test_counts_by_any_name_stay():
    counts = {
        "tokens": 7,
        "tokens_by_length": [1, 2.5],
        "valid": {"bytes_over_tokens": 2.5},
        "none": None,
    }
    assert loggable(counts) == counts


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("abc /.:-", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=4), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(json_values)
def test_plain_values_are_unchanged(value):
    assert loggable(value) == value


@given(st.text(max_size=60))
def test_no_other_sign_than_those_of_the_list_is_written(text: str):
    allowed = set(" .,:;+*/|()[]<>%~^-_")
    assert all(sign.isalnum() or sign in allowed for sign in loggable(text))


@pytest.mark.parametrize(
    "words", [["--save", "x", "-p"], ["--no-load-optim"], ["--lr", "1"], ["--lr=1"], ["-p"], []]
)
def test_words_that_no_served_flag_takes_are_removed(words: list[str]):
    assert SECRET not in " ".join(loggable_command(["train.py", *words, SECRET]))


def test_every_value_of_a_served_flag_is_kept():
    words = [
        "train.py",
        "--data-path",
        "1",
        "a",
        "2",
        "b",
        "--window-size",
        "-1,0",
        "--seed",
        "-1",
        "--lr=-.5",
    ]
    assert loggable_command(words) == words


def test_keys_of_mappings_are_texts_too():
    assert loggable({"hf_abcdefghijKLMNOPqrst": 1, "kept": {SECRET + "=": 2, "also": 3}}) == {
        "kept": {"also": 3}
    }
