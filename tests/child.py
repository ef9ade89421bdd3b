"""A test in a process of its own: what it imports stays there."""

import contextlib
import functools
import multiprocessing
import traceback
from concurrent.futures import ProcessPoolExecutor

from tests.processes import HANG_SECONDS


def in_a_child(test):
    """Makes a test run in a forked child; its failure is raised here, as text.

    For tests that import Megatron-Core without the CPU stand-ins: ranks that later tests fork must not inherit it.
    """

    @functools.wraps(test)
    def run(**fixtures):
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_answer, args=(theirs, test, fixtures))
        child.start()
        theirs.close()
        said = ours.recv() if ours.poll(HANG_SECONDS) else f"no answer in {HANG_SECONDS} s"
        if said is not None and child.is_alive():
            child.kill()
        child.join()
        assert said is None, said

    return run


def _answer(connection, test, fixtures):
    try:
        test(**fixtures)
        connection.send(None)
    except BaseException:
        connection.send(traceback.format_exc())


@contextlib.contextmanager
def fresh_process():
    """Yields a function that calls another, of a module, in one new interpreter: nothing of this process is there.

    For what the CPU stand-ins of Megatron-Core would disturb: earlier tests may have put them in this process.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=HANG_SECONDS)
