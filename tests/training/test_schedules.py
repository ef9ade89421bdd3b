"""Learning rate and weight decay against closed forms."""

import math

import pytest

from tests.ranks import run_on_ranks
from tests.training.commands import SMALL_RUN

LR, MIN_LR, WARMUP, DECAY, BATCH = 1e-3, 1e-4, 10, 50, 2


def rates_of_steps(rank: int, world_size: int, flags: list[str], num_steps: int):
    """(learning rate, weight decay) after each step, on a rank that imports Megatron."""
    from types import SimpleNamespace

    from megatron_cp.mcore import cpu
    from megatron_cp.mcore.versions import compat

    compat.silence_known_warnings()
    cpu.install()
    from megatron_cp.training.arguments import parse_arguments
    from megatron_cp.training.optim import build_scheduler

    group = {"lr": 0.0, "weight_decay": 0.0}
    config = parse_arguments([*SMALL_RUN, *flags], {})
    scheduler = build_scheduler(config, SimpleNamespace(param_groups=[group]))
    rates = [(group["lr"], group["weight_decay"])]
    for _ in range(num_steps):
        scheduler.step(config.steps.global_batch_size)
        rates.append((group["lr"], group["weight_decay"]))
    return rates


def rates(*flags: str, num_steps: int = 60) -> list[tuple[float, float]]:
    base = ["--train-iters", str(DECAY), "--lr", str(LR), "--min-lr", str(MIN_LR)]
    base += ["--lr-warmup-iters", str(WARMUP), "--global-batch-size", str(BATCH)]
    return run_on_ranks(1, rates_of_steps, [*base, *flags], num_steps)[0]


def expected(style: str, step: int, wsd: int = 20) -> float:
    if step <= WARMUP:
        return LR * step / WARMUP
    if style == "constant":
        return LR
    if step > DECAY:
        return MIN_LR
    if style == "inverse-square-root":
        return max(MIN_LR, LR * math.sqrt(WARMUP / step))
    part = (step - WARMUP) / (DECAY - WARMUP)
    last = max(0.0, (step - (DECAY - wsd)) / wsd)
    share = {
        "linear": 1 - part,
        "cosine": (1 + math.cos(math.pi * part)) / 2,
        "WSD linear": 1 - last,
        "WSD cosine": (1 + math.cos(math.pi * last)) / 2,
        "WSD exponential": 2 * 0.5**last - 1,
        "WSD minus_sqrt": 1 - math.sqrt(last),
    }[style]
    return MIN_LR + share * (LR - MIN_LR)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
def test_a_schedule_follows_its_closed_form(style: str):
    for step, (rate, _) in enumerate(rates("--lr-decay-style", style)):
        # inverse-square-root counts packs under the root; the ratio is the same
        assert rate == pytest.approx(expected(style, step), rel=1e-12), step


@pytest.mark.parametrize("last", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_wsd_holds_and_then_falls_in_its_style(last: str):
    flags = ["--lr-decay-style", "WSD", "--lr-wsd-decay-style", last, "--lr-wsd-decay-iters", "20"]
    for step, (rate, _) in enumerate(rates(*flags)):
        assert rate == pytest.approx(expected(f"WSD {last}", step), rel=1e-12), step


def test_a_schedule_in_samples_equals_the_same_in_iterations():
    samples = ["--train-samples", str(DECAY * BATCH), "--lr-warmup-samples", str(WARMUP * BATCH)]
    by_iters = rates("--lr-decay-style", "cosine", num_steps=50)
    by_samples = run_on_ranks(1, rates_by_samples, samples)[0]
    assert by_samples == pytest.approx([rate for rate, _ in by_iters], rel=1e-12)


def rates_by_samples(rank: int, world_size: int, samples: list[str]):
    place = SMALL_RUN.index("--train-iters")
    flags = [*SMALL_RUN[:place], *SMALL_RUN[place + 2 :], *samples]
    flags += ["--lr", str(LR), "--min-lr", str(MIN_LR), "--lr-decay-style", "cosine"]
    from types import SimpleNamespace

    from megatron_cp.mcore import cpu

    cpu.install()
    from megatron_cp.training.arguments import parse_arguments
    from megatron_cp.training.optim import build_scheduler

    group = {"lr": 0.0, "weight_decay": 0.0}
    config = parse_arguments(flags, {})
    scheduler = build_scheduler(config, SimpleNamespace(param_groups=[group]))
    found = [group["lr"]]
    for _ in range(DECAY):
        scheduler.step(config.steps.global_batch_size)
        found.append(group["lr"])
    return found


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_weight_decay_grows_in_its_style(style: str):
    flags = ["--weight-decay-incr-style", style]
    if style == "constant":
        flags += ["--weight-decay", "0.3"]
    else:
        flags += ["--start-weight-decay", "0.1", "--end-weight-decay", "0.3"]
    for step, (_, decay) in enumerate(rates(*flags)):
        part = min(1.0, step / DECAY)
        share = {"constant": 1.0, "linear": part, "cosine": (1 - math.cos(math.pi * part)) / 2}
        assert decay == pytest.approx(0.1 + 0.2 * share[style], rel=1e-12), step
