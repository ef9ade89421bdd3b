"""The pool of ranks itself: order, failures, deadlocks."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankTimeoutError, run_on_ranks


class UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__("lost")
        self.sum = first + second


def _sum_of_ranks(rank, world_size, start):
    x = torch.tensor(float(rank + start))
    dist.all_reduce(x)
    return rank, world_size, x.item()


def _process_id(rank, world_size):
    return os.getpid()


def _num_threads(rank, world_size):
    return torch.get_num_threads()


def _random_number(rank, world_size):
    return torch.rand(()).item()


def _fail_on(rank, world_size, failing_rank):
    if rank == failing_rank:
        raise KeyError(f"planted on {rank}")
    dist.barrier()


def _fail_everywhere(rank, world_size):
    raise ValueError(f"rank {rank} refuses")


def _raise_unpicklable(rank, world_size):
    raise UnpicklableError(1, 2)


def _exit_on_zero(rank, world_size):
    if rank == 0:
        os._exit(3)


def _wait_for_the_others_on_zero(rank, world_size):
    if rank == 0:
        dist.barrier()


def _echo_from_zero(rank, world_size, rows):
    return rows * 2 if rank == 0 else None


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_results_come_in_the_order_of_ranks(world_size):
    total = 10.0 * world_size + sum(range(world_size))
    expected = [(rank, world_size, total) for rank in range(world_size)]
    assert run_on_ranks(world_size, _sum_of_ranks, 10) == expected


def test_pool_is_used_again():
    assert run_on_ranks(2, _process_id) == run_on_ranks(2, _process_id)


def test_two_calls_see_the_same_random_numbers():
    assert run_on_ranks(2, _random_number) == run_on_ranks(2, _random_number)


def test_parent_and_ranks_have_one_thread():
    assert torch.get_num_threads() == 1
    assert run_on_ranks(2, _num_threads) == [1, 1]


def test_exception_of_failing_rank_is_raised_with_rank_and_traceback():
    with pytest.raises(KeyError, match="planted on 1") as caught:
        run_on_ranks(3, _fail_on, 1)
    cause = caught.value.__cause__
    assert isinstance(cause, RankError)
    assert "rank 1 of 3" in str(cause)
    assert "_fail_on" in str(cause)


def test_pool_is_replaced_after_a_failure():
    before = run_on_ranks(2, _process_id)
    with pytest.raises(KeyError):
        run_on_ranks(2, _fail_on, 0)
    assert not set(before) & set(run_on_ranks(2, _process_id))


def test_exceptions_of_all_ranks_can_be_collected():
    errors = run_on_ranks(3, _fail_everywhere, return_exceptions=True)
    assert [str(e) for e in errors] == [f"rank {rank} refuses" for rank in range(3)]


def test_exception_that_cannot_be_pickled_keeps_its_traceback():
    with pytest.raises(RankError, match="UnpicklableError"):
        run_on_ranks(1, _raise_unpicklable)


def test_death_of_a_rank_is_reported_with_its_exit_code():
    with pytest.raises(RankError, match="rank 0 of 2 died with exit code 3"):
        run_on_ranks(2, _exit_on_zero)


def test_hang_is_reported_as_deadlock_with_the_place():
    for timeout in (1.0, 8.0, 64.0):  # rank 1 must answer meanwhile, on a slow machine too
        with pytest.raises(RankTimeoutError, match="deadlock") as caught:
            run_on_ranks(2, _wait_for_the_others_on_zero, timeout=timeout)
        if "ranks [0] of 2" in str(caught.value):
            break
    assert "ranks [0] of 2" in str(caught.value)
    assert "_wait_for_the_others_on_zero" in str(caught.value)


def test_large_arguments_and_results_travel():
    rows = torch.arange(1_000_000)
    doubled, nothing = run_on_ranks(2, _echo_from_zero, rows)
    assert torch.equal(doubled, rows * 2)
    assert nothing is None
