"""Nothing that looks like a secret passes the scrubber."""

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.training.logging.scrub import REMOVED, is_secret_name, scrubbed, scrubbed_words

SECRET = "hunter2-PLANTED"


@pytest.mark.parametrize(
    "name",
    shlex.split(
        "api_key HF_TOKEN wandb-api-key dbPassword secret aws_secret_access_key credentials "
        "my_credential AuthToken passwd keys access.key"
    ),
)
def test_names_of_secrets_are_known(name: str):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    shlex.split(
        "tokenizer_model tokenizer_type monkey keyboard hidden_size data_path "
        "calculate_per_token_loss kv_channels eod_token"
    ),
)
def test_ordinary_names_are_kept(name: str):
    assert not is_secret_name(name)
    assert scrubbed({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    "value",
    [
        {"api_key": SECRET},
        {"outer": {"inner": [{"token": SECRET}]}},
        {"url": f"https://user:{SECRET}@host/path"},
        {"url": f"https://{SECRET}@host/path"},
        {"url": f"s3://host/path?x=1&api_key={SECRET}&y=2"},
        {"password": [SECRET]},
        {"command": ["train", "--api-key", SECRET, "--x"]},
        {"command": ["train", f"--auth-token={SECRET}"]},
        {"command": (f"PASSWORD={SECRET}", "run")},
    ],
    ids=str,
)
def test_a_planted_secret_is_gone(value):
    text = json.dumps(scrubbed(value))
    assert SECRET not in text
    assert REMOVED in text or "https://host/path" in text


def test_counts_of_tokens_are_not_secrets_but_texts_are():
    counts = {"tokens": 7, "tokens_by_length": [1, 2], "api_tokens": SECRET}
    assert scrubbed(counts) == {**counts, "api_tokens": REMOVED}


def test_everything_else_of_a_command_line_stays():
    words = ["run", "--lr", "1e-3", "--tokenizer-model", "a/b.json", "--no-wandb"]
    assert scrubbed_words(words) == words


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("abc", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=4), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(json_values)
def test_values_without_secrets_are_unchanged(value):
    assert scrubbed(value) == value
