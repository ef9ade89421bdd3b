"""Groups made beside a context group: once, by its ranks alone, whatever the job's own group is bound to."""

import contextlib
import datetime
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_cp import CPConfig, cp_attention, make_plan
from megatron_cp import mask as masks
from megatron_cp.comm import groups
from megatron_cp.runtime.session import open_session
from tests.ranks import run_on_ranks


def made_beside(rank, world_size):
    """What torch sees while a group is made, under a job that was started with a device."""
    world = dist.distributed_c10d._get_default_group()
    make, seen = dist.distributed_c10d.new_group, []

    def recorded(ranks, **options):
        seen.append((ranks, options["use_local_synchronization"], world.bound_device_id))
        return make(ranks, **options)

    dist.distributed_c10d.new_group, world.bound_device_id = recorded, torch.device("cuda", rank)
    try:
        made = groups._beside(dist.group.WORLD, "a test", "gloo", None)
        again = groups._beside(dist.group.WORLD, "a test", "gloo", None)
        bound = world.bound_device_id
    finally:
        dist.distributed_c10d.new_group, world.bound_device_id = make, None
    sums = torch.tensor([rank + 1])
    dist.all_reduce(sums, group=made)
    return seen, made is again, bound, sums.item()


def test_a_group_does_not_split_the_communicator_of_all_ranks():
    """Splitting waits for ranks that are not in the group: later pipeline stages, which wait for this one."""
    for rank, (seen, is_kept, bound, total) in enumerate(run_on_ranks(2, made_beside)):
        assert seen == [([0, 1], True, None)]
        assert is_kept
        assert bound == torch.device("cuda", rank)
        assert total == 3


@contextlib.contextmanager
def counting_every_group():
    """What torch does since 2.14: groups that their ranks alone make are counted, and later names follow the count."""
    c10d = dist.distributed_c10d
    plain, count = c10d._process_group_name, c10d._world.group_count

    def counted(ranks, use_hashed_name):
        before = c10d._world.group_count
        name = plain(ranks, use_hashed_name)
        c10d._world.group_count = before + 1
        return name

    c10d._process_group_name = counted
    try:
        yield
    finally:
        c10d._process_group_name = plain
        c10d._world.group_count = count + 10  # no name comes back, and the ranks agree again


def made_after_another(rank, world_size):
    """The sum over a group, made when rank 0 is in one group more: as the first stage of a pipeline is."""
    with counting_every_group():
        if rank == 0:
            dist.new_group([0], use_local_synchronization=True)
        made = groups._beside(dist.group.WORLD, "a test", "gloo", None)
        of_two = groups._beside(dist.group.WORLD, "another test", "gloo", None)
    sums = torch.tensor([rank + 1])
    dist.all_reduce(sums, group=made)
    dist.all_reduce(sums, group=of_two)
    return sums.item(), made.group_name == of_two.group_name


def test_ranks_in_other_numbers_of_groups_meet():
    """torch names a group by how many the rank is in: ranks of a pipeline would wait for one another for ever."""
    assert run_on_ranks(2, made_after_another) == [(6, False)] * 2


def name_of_the_next(rank, world_size):
    """How torch would name a group of all ranks, when rank 0 alone has one of ours."""
    with counting_every_group():
        alone = dist.new_group([0]), dist.new_group([1])
        if rank == 0:
            groups._beside(alone[0], "a test", "gloo", None)
        return dist.distributed_c10d._process_group_name([0, 1], use_hashed_name=False)


def test_groups_that_the_program_makes_later_meet():
    """Ranks that give a group two names wait for one another for ever."""
    first, second = run_on_ranks(2, name_of_the_next)
    assert first == second


def timeout_beside(rank, world_size):
    """The time-outs of a group and of the one made beside it, in minutes."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(minutes=7))
    made = groups._beside(group, "a test", "gloo", None)
    cpu = torch.device("cpu")
    return [g._get_backend(cpu).options._timeout.seconds / 60 for g in (group, made)]


def test_a_group_beside_another_waits_as_long():
    assert run_on_ranks(2, timeout_beside) == [[7.0, 7.0]] * 2


def started_twice(rank, world_size, files):
    """Whether the second start of a process is told from the first: groups, plans, and what they agreed on."""
    plan = make_plan(masks.causal(64), world_size, CPConfig(planner="zigzag", head_dim=16))
    x = torch.randn(64 // world_size, 1, 16)
    names, outs = [], []
    for file in files:
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=world_size
        )
        world = dist.group.WORLD
        outs.append(cp_attention(x, x, x, plan, world)[0])
        session = open_session(plan, world, x.device)
        names.append((world.group_name, groups.name_of(world), session.group is world))
    return names, torch.equal(*outs)


def test_a_group_of_a_second_start_is_not_taken_for_that_of_the_first(tmp_path):
    files = [str(tmp_path / name) for name in ("first", "second")]
    for names, are_equal in run_on_ranks(2, started_twice, files):
        (first, ours, is_own), (second, ours_again, is_own_again) = names
        assert first == second  # torch's names come back
        assert ours != ours_again
        assert is_own and is_own_again
        assert are_equal


class StandsFor(dist.ProcessGroup):
    """A group as a program hands it out that frees torch's and makes those anew: slime's, written down again."""

    def __init__(self, group):
        super().__init__(group.rank(), group.size())
        self.group = group

    def rank(self):
        return self.group.rank()

    def size(self):
        return self.group.size()


@contextlib.contextmanager
def functions_that_know_such_groups():
    """torch's functions as that program wraps them: they take the group that stands behind."""
    names = ("get_rank", "get_world_size", "all_gather", "all_to_all_single")
    plain = {name: getattr(dist, name) for name in names}

    def own(value):
        return value.group if isinstance(value, StandsFor) else value

    def wrapped(function):
        return lambda *args, **more: function(
            *map(own, args), **{k: own(x) for k, x in more.items()}
        )

    try:
        for name, function in plain.items():
            setattr(dist, name, wrapped(function))
        yield
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


def attention_over_groups_made_anew(rank, world_size):
    """Whether results are those of torch's own group, and which group rows travel over, at first and made anew."""
    plan = make_plan(masks.causal(64), world_size, CPConfig(planner="zigzag", head_dim=16))
    x = torch.randn(64 // world_size, 1, 16)
    expected, found = cp_attention(x, x, x, plan, dist.group.WORLD)[0], []
    with functions_that_know_such_groups():
        group = StandsFor(dist.new_group([0, 1]))
        for _ in range(2):
            out = cp_attention(x, x, x, plan, group)[0]
            is_behind = open_session(plan, group, x.device).group is group.group
            found.append((torch.equal(out, expected), is_behind, groups.name_of(group)))
            dist.destroy_process_group(group.group)
            group.group = dist.new_group([0, 1])
    return found


def test_a_group_that_stands_for_one_of_torch_is_followed_when_that_is_made_anew():
    for (*first, name), (*second, new_name) in run_on_ranks(2, attention_over_groups_made_anew):
        assert first == second == [True, True]
        assert name != new_name


def test_gloo_ranks_need_no_group_beside_theirs():
    assert run_on_ranks(2, uses_its_own) == [True, True]


def uses_its_own(rank, world_size):
    group = dist.group.WORLD
    return groups.transfer_group(group) is group and groups.agreement_group(group) is group


@pytest.mark.parametrize(
    ("backends", "made"),
    [
        ("cuda:nccl", ["rows", "agreements"]),
        (
            "cpu:gloo,cuda:nccl",
            ["rows"],
        ),  # of init_process_group() without a backend on a GPU machine
        ("cpu:gloo,cuda:gloo", []),
        ("cpu:gloo", []),
    ],
)
def test_rows_on_nccl_get_a_communicator_of_their_own_whatever_serves_cpu_tensors(
    monkeypatch, backends, made
):
    kinds = [torch.device(pair.split(":")[0]) for pair in backends.split(",")]
    group, found = SimpleNamespace(_device_types=kinds), []
    nccl = SimpleNamespace(Options=lambda **more: SimpleNamespace(config=SimpleNamespace(), **more))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    monkeypatch.setattr(groups, "_beside", lambda _, use, *options: found.append((use, *options)))
    groups.transfer_group(group)
    groups.agreement_group(group)
    assert [use for use, *_ in found] == made
    of_rows = [options for _, _, options in found if options]
    assert len(of_rows) == made.count("rows")
    for options in of_rows:
        assert options.is_high_priority_stream
        assert vars(options.config) == {"cga_cluster_size": 1}
