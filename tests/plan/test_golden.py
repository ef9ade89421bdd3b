"""Plans of the golden corpus are the same, byte for byte, as they were when the file was written."""

import json

import pytest

from tests.plan.golden import FILE, cases

NUMBERS = json.loads(FILE.read_text())
CASES = {case.name: case for case in cases()}


def test_the_file_holds_the_whole_corpus_and_nothing_else():
    assert list(NUMBERS) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_of_the_corpus_is_what_it_was(name):
    assert CASES[name].number() == NUMBERS[name]
