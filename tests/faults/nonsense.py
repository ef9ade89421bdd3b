"""Calls of the public functions of `mask`, and of CPConfig, make_plan and make_plans, with values drawn at random.

    python -m tests.faults.nonsense --calls 20000 --seed 3

Whatever comes, a call returns or raises an error of ours (the `raise` is in this package), within three seconds of
processor time and a gigabyte. What breaks that is printed, each kind once.
"""

import argparse
import inspect
import random
import resource
import signal
import traceback
from dataclasses import fields
from pathlib import Path

import numpy as np

import megatron_cp as mcp
from megatron_cp import mask as masks

REFUSALS = (ValueError, TypeError, NotImplementedError)
# Of processor time in one call. The slowest of 105,000 took .62 s on one core of a Xeon (2026-11-26); the rest is for
# slower machines.
MAX_SECONDS = 3
# Of address space, beyond that of this process before; the same calls took .18 GiB.
MAX_BYTES = 1 << 30

SMALL = masks.causal(12)
SLICE = masks.MaskSlice(0, 4, 0, 4, None, 0)
NUMBERS = [-1, 0, 1, 3, 7, 2**31, 2**40, 2**62, 2**63, 2**70, 1.5, float("nan"), float("inf"), True]
WORDS = ["causal", "x", "", "window", b"x", ("window", 2), ("window", -5), ("window", "x")]
LISTS = [
    [], [1], [1, 2, 3], [-1, 2], [2**62, 2**62], ["a"], [None], [1.5], (), (1, 2), ((1, 2), (3, 4)),
    [[1, 2], [3]], [(0, 4, 0, 4, None, 0)], [(0, 2**62, 0, 2**62, None, None)], ["causal", "full"],
    [("prefix", 3)], range(5), {}, {"a": 1}, {1},
]  # fmt: skip
ARRAYS = [
    np.array([1, 2, 3]), np.array([[0, 1], [2, 3]]), np.array(3), np.array([2**62]), np.array([1.5]),
    np.array(["a"]), np.zeros((0, 6)), np.ones((3, 3), bool), np.ones((2, 6)), np.ones((2, 6), int),
]  # fmt: skip
LARGE = [masks.causal(2**31), masks.block_causal(2**17, 16), masks.sliding_window(2**30, 5)]
OBJECTS = [None, object(), lambda *_: 1, lambda _: SMALL, SMALL, masks.full(3, 5), SLICE, *LARGE]
VALUES = [*NUMBERS, *WORDS, *LISTS, *ARRAYS, *OBJECTS, masks.MaskSlice(0, 2**62, 0, 4)]
PLANNED = [
    SMALL, masks.documents([100, 200, 3], "causal"), masks.full(0), masks.full(1), masks.full(3, 5),
    *LARGE, None, 3, "causal", [], {}, np.zeros((3, 3)),
    {"a": SMALL}, {"a": 3}, [SMALL], {"a": (SMALL, 2)}, {"full": SMALL, "other": masks.causal(10)},
]  # fmt: skip


class TooSlowError(BaseException):
    """A call did not end."""


def mask_functions():
    """Yields the public functions of `mask`, and the methods of its two classes but for the unchecked `many`."""
    for name in masks.__all__:
        if inspect.isfunction(getattr(masks, name)):
            yield name, getattr(masks, name)
    for one in (SMALL, SLICE):
        for name in dir(one):
            if not name.startswith("_") and name != "many" and callable(getattr(one, name)):
                yield f"{type(one).__name__}.{name}", getattr(one, name)
    yield "MaskSlice", masks.MaskSlice


def call_of_a_mask_function(draw, functions):
    """Returns a name and a function to call."""
    name, function = draw.choice(functions)
    arguments, named = [], {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty or draw.random() < 0.4:
                named[parameter.name] = draw.choice(VALUES)
        elif parameter.default is parameter.empty or draw.random() < 0.5:
            arguments.append(draw.choice(VALUES))
        else:
            break
    return name, lambda: function(*arguments, **named)


def call_of_a_planner(draw):
    """Returns a name and a function to call."""
    names = [field.name for field in fields(mcp.CPConfig)]
    settings = {name: draw.choice(VALUES) for name in draw.sample(names, draw.choice([0, 1, 2]))}
    mask, ranks = draw.choice(PLANNED), draw.choice([1, 2, 3, 8, *NUMBERS, "x", None])
    function = draw.choice([mcp.make_plan, mcp.make_plans])
    return function.__name__, lambda: function(mask, ranks, mcp.CPConfig(**settings))


def fault_of(call):
    """Returns what a call does wrong, None if nothing."""
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        result = call()
        if isinstance(result, masks.AttentionMask) and result.area() < 0:
            return "an area below 0"
    except TooSlowError:
        return f"takes more than {MAX_SECONDS} s"
    except REFUSALS as refusal:
        raised = traceback.extract_tb(refusal.__traceback__)[-1]
        if "raise" not in (raised.line or "") or "megatron_cp" not in raised.filename:
            return f"{type(refusal).__name__} from {raised.filename.rsplit('/', 1)[-1]}:{raised.lineno}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def _ring(*_):
    raise TooSlowError


def address_space():
    """Returns how many bytes this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def faults(seed, mask_calls, planner_calls):
    """Returns the faults of so many calls, each kind once. Limits the memory of this process for good."""
    most = address_space() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, _ring)
    draw, functions = random.Random(seed), list(mask_functions())
    found = {}
    with np.errstate(all="ignore"):
        for index in range(mask_calls + planner_calls):
            make = call_of_a_planner if index >= mask_calls else call_of_a_mask_function
            more = () if index >= mask_calls else (functions,)
            name, call = make(draw, *more)
            fault = fault_of(call)
            if fault is not None:
                found[name, fault] = found.get((name, fault), 0) + 1
    return [f"{name}: {fault} ({count} times)" for (name, fault), count in found.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--planner-calls", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = faults(options.seed, options.calls, options.planner_calls)
    print("\n".join(lines) or "no fault")  # noqa: T201
    raise SystemExit(bool(lines))
