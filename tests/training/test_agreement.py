"""Ranks that were started differently are told apart, and the odd ones are named."""

from megatron_cp.training.agreement import differing_file, first_difference


def test_equal_ranks_have_no_difference():
    assert first_difference([{"--lr": 1.0, "--seed": 1}] * 3) is None


def test_the_first_difference_names_entry_values_and_the_odd_ranks():
    entries = [{"--lr": 1e-3, "--seed": 1}] * 2 + [{"--lr": 2e-3, "--seed": 7}]
    line = first_difference(entries)
    assert line is not None
    for part in ("--lr", "0.002 on rank 2", "0.001 on rank 0", "ranks [2]"):
        assert part in line
    assert "--seed" not in line


def test_an_entry_that_one_rank_lacks_is_a_difference():
    line = first_difference([{"documents": "a"}, {}, {"documents": "a"}])
    assert line is not None
    assert "null on rank 1" in line


def test_the_first_token_file_that_differs_is_named_with_its_ranks():
    good = [("/a/one.bin", "11" * 32), ("/a/two.bin", "22" * 32)]
    odd = [("/b/one.bin", "11" * 32), ("/b/two.bin", "33" * 32)]
    line = differing_file([good, good, odd, good])
    assert line is not None
    for part in ("/b/two.bin of ranks [2]", "/a/two.bin of rank 0", "3333", "2222", "all 4 ranks"):
        assert part in line
    assert "one.bin" not in line


def test_files_of_other_names_and_files_without_a_manifest_are_no_difference():
    assert (
        differing_file([[("/a/x.bin", "11")], [("/b/y.bin", "11")], [("/c/z.bin", None)]]) is None
    )
    assert differing_file([[("/a/x.bin", None)], [("/b/y.bin", None)]]) is None
