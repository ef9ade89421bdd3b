"""What one rank finds reaches all of them, in the order of ranks."""

import pytest

from tests.ranks import run_on_ranks


def refusals(rank, _, wrong):
    """What this rank is told where the ranks of `wrong` refuse, each in words of its own."""
    from megatron_cp.training.together import refused_together

    done = False
    try:
        with refused_together(OSError):
            if rank in wrong:
                raise FileNotFoundError(f"rank {rank} has no file")
            done = True
    except ValueError as refusal:
        return str(refusal), done, type(refusal.__cause__)
    return None, done, None


@pytest.mark.parametrize("wrong", [(), (0,), (2,), (1, 2), (0, 1, 2)])
def test_all_ranks_refuse_with_the_words_of_the_first_that_does(wrong):
    words = f"rank {wrong[0]} has no file" if wrong else None
    assert run_on_ranks(3, refusals, wrong) == [
        (
            words,
            rank not in wrong,
            (FileNotFoundError if rank in wrong else type(None)) if wrong else None,
        )
        for rank in range(3)
    ]


def what_is_not_asked_for(rank, _):
    from megatron_cp.training.together import refused_together

    with pytest.raises(KeyError), refused_together(ValueError):
        raise KeyError(rank)
    return True


def test_what_is_not_asked_for_is_raised_as_it_is():
    assert run_on_ranks(1, what_is_not_asked_for) == [True]


def heard(rank, world_size):
    import torch.distributed as dist

    from megatron_cp.training.together import gather

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return gather({"rank": rank}), gather(rank, pairs[rank // 2])


def test_each_rank_hears_all_of_its_group_in_order():
    everybody = [{"rank": rank} for rank in range(4)]
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert run_on_ranks(4, heard) == [(everybody, pair) for pair in pairs]
