"""What every test gets: poisoned `torch.empty`, a hypothesis profile, and nothing left behind at the end."""

import functools
import gc
import getpass
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import durations, processes, ranks

hypothesis.settings.register_profile(
    "suite",
    max_examples=50,
    deadline=None,  # a busy machine is not a defect
    derandomize=True,  # the same examples for everybody: a red suite stays red
    database=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.differing_executors,
    ],
)
# For `make test-fast`: fewer examples of the same kinds.
hypothesis.settings.register_profile(
    "fast", parent=hypothesis.settings.get_profile("suite"), max_examples=10
)
# For tools/plant_bugs.py, which asks whether a test fails and not why.
hypothesis.settings.register_profile(
    "no_shrinking",
    parent=hypothesis.settings.get_profile("suite"),
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
# For a hunt: pytest --hypothesis-profile hunt
hypothesis.settings.register_profile(
    "hunt", parent=hypothesis.settings.get_profile("suite"), max_examples=2000, derandomize=False
)
hypothesis.settings.load_profile("suite")


def _is_ours(module_name: str) -> bool:
    return module_name.split(".")[0] in ("megatron_cp", "tests")


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns `allocate` with NaN (largest value for integers) in what our own code allocates.

    `torch.utils.deterministic.fill_uninitialized_memory` would do this too, but only under
    deterministic algorithms, which change results and refuse operations. Code of others is left
    alone: Megatron-Core reads padding that it never wrote.
    """

    @functools.wraps(allocate)
    def wrapper(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor:
            return tensor  # fake tensors have no values
        if not _is_ours(sys._getframe(1).f_globals.get("__name__", "")):
            return tensor
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan"))
            elif tensor.dtype == torch.bool:
                tensor.fill_(True)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return wrapper


torch.empty = _poisoned(torch.empty)
torch.empty_like = _poisoned(torch.empty_like)
torch.empty_strided = _poisoned(torch.empty_strided)
torch.Tensor.new_empty = _poisoned(torch.Tensor.new_empty)
torch.set_num_threads(1)
# Autograd counts devices in its first backward pass; if there are some, forks of this process have no backward pass,
# and ranks are forks. Where torch is built for CUDA a fake tensor puts up a device: none is there yet.
torch.ones(1, requires_grad=True).sum().backward()
# Threads of programs that tests start wait asleep. Awake, two of them beside another worker take three times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
gc.disable()  # imports and a collection of tests make little garbage, and much to look through

# They put Megatron-Core's CPU stand-ins into the test process, where they stay and torch compiles nothing any more.
_LEAVE_STAND_INS = (
    "tests/mask/test_interop.py",
    "tests/mcore/",
    "tests/models/",
    "tests/training/",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what measures the tests again."""
    parser.addoption("--write-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Records durations where that is asked for, in the process that has the reports of all workers."""
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that took long; stand-ins come last, whatever was asked for and in which order; long files begin.

    Two workers take whole files, in this order: a long one that began last would keep one of them alone.
    """
    known = durations.known()

    def place(item: pytest.Item) -> tuple[bool, float]:
        name = item.nodeid.partition("::")[0]
        return name.startswith(_LEAVE_STAND_INS), -known["files"].get(name, 0.0)

    for item in items:
        if durations.name_of(item.nodeid) in known["slow"]:
            item.add_marker("slow")
    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What imports made stays: a collection need not look at it, nor copy its pages in the ranks that are forks."""
    gc.collect()
    gc.freeze()
    gc.enable()


# Folders of tests that start programs.
_STARTS_PROGRAMS = ("training", "faults", "data", "tools", "mcore", "report", "hugging_face")


@pytest.fixture(autouse=True)
def _fixed_seed():
    """Every test starts from the same state of torch's generator, whatever ran before it."""
    torch.manual_seed(1234)


@pytest.fixture(scope="session")
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The session's own temporary folder: what stays there is of its tests, whoever else uses the machine."""
    kept = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))  # compiled once for all sessions
    folder = tmp_path_factory.mktemp("temporary")
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    yield folder
    tempfile.tempdir = before[0]
    os.environ["TMPDIR"] = before[1] or ""


@pytest.fixture(scope="session", autouse=True)
def _the_session_leaves_nothing(_temporary_folder: Path) -> Iterator[None]:
    """At the end no process of any test runs, and shared memory is as it was."""
    processes.adopt_orphans()
    before = processes.shared_memory()
    yield
    ranks.close_pools()
    processes.check_nothing_is_left(before)


@pytest.fixture(autouse=True)
def _the_test_leaves_nothing(
    request: pytest.FixtureRequest, _temporary_folder: Path
) -> Iterator[None]:
    """Where tests start programs, each leaves no process, no shared memory and no temporary folder of a run."""
    if request.path.parent.name not in _STARTS_PROGRAMS:
        yield
        return
    before = processes.shared_memory()
    folders = processes.temporary_folders(_temporary_folder)
    yield
    processes.check_nothing_is_left(before)
    processes.check_nothing_stays_in(_temporary_folder, but=folders)
