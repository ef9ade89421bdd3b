"""What a run trained, in numbers: tokens, losses as perplexity and bits per byte, and what guessing would score."""

from __future__ import annotations

import math

import numpy as np

from megatron_cp.report.draw.html import Tile
from megatron_cp.report.draw.svg import count_of, exact, plain, short
from megatron_cp.report.run.health import tenth
from megatron_cp.report.run.record import LOSS, Run


def trained_tiles(run: Run) -> list[Tile]:
    """Returns the tiles of the losses and of how much was read."""
    tiles = []
    losses = np.array(run.logged(LOSS)[1])
    if len(losses):
        last = losses[-tenth(losses) :]
        steps = "the last step" if len(last) == 1 else f"mean of the last {len(last)} steps"
        tiles.append(
            Tile(
                "Training loss",
                f"{last.mean():.3f}",
                f"nats per token, from {losses[0]:.2f}; {steps}",
            )
        )
    _, held_out = run.logged(run.held_out_loss)
    if held_out:
        tiles.append(
            Tile("Held-out loss", f"{held_out[-1]:.3f}", held_out_words(run, held_out[-1]))
        )
    return [*tiles, *_amount_tiles(run)]


def held_out_words(run: Run, loss: float) -> str:
    """Returns a held-out loss in other units, beside that of a model that knows nothing."""
    if math.isnan(loss):
        return "not finite at the last evaluation"
    words = [f"perplexity {short(math.exp(min(loss, 700.0)))}"]
    per_byte = bits_per_byte(run, loss)
    if per_byte is not None:
        words.append(f"{per_byte:.2f} bits per byte")
    vocabulary = vocabulary_size(run)
    if vocabulary is not None:
        words.append(f"guessing evenly among {vocabulary:,} tokens: {math.log(vocabulary):.2f}")
    return "; ".join(words)


def bits_per_byte(run: Run, loss: float) -> float | None:
    """Returns the loss in bits over a byte of held-out text; None where the run did not say what a token holds."""
    data = run.section("data")
    splits = [data[name] for name in ("valid", "test", "train") if isinstance(data.get(name), dict)]
    size = splits[0].get("bytes_over_tokens") if splits else None
    if not isinstance(size, (int, float)) or isinstance(size, bool) or not 0 < size < math.inf:
        return None
    return loss / math.log(2) / size


def vocabulary_size(run: Run) -> int | None:
    """Returns the tokens that the model chooses from, those of padding included."""
    sizes = (run.argument(name) for name in ("padded_vocab_size", "vocab_size"))
    return next(
        (n for n in sizes if isinstance(n, int) and not isinstance(n, bool) and n > 1), None
    )


def _amount_tiles(run: Run) -> list[Tile]:
    """Returns how much was read, and how fast; nothing where the arguments do not say what a step reads."""
    batch, seq_length = run.argument("global_batch_size"), run.argument("seq_length")
    if not isinstance(batch, int) or not isinstance(seq_length, int):
        return []
    steps, samples = _steps_and_samples(run)
    tokens = (steps * batch if samples is None else samples) * seq_length
    size = f"{batch * seq_length:,}"
    if tokens != steps * batch * seq_length:  # the batch grew, or another part had another one
        size = f"{tokens / max(steps, 1):,.0f} on average"
    detail = f"{count_of(steps, 'step')} of {size}, packs full"
    train = run.section("data").get("train")
    total = train.get("tokens") if isinstance(train, dict) else None
    if isinstance(total, int) and total > 0:
        detail += f"; {tokens / total:.2f} × the training documents"
    return [Tile("Tokens read", exact(tokens), detail), *_speed_tile(run, batch * seq_length)]


def _steps_and_samples(run: Run) -> tuple[int, int | None]:
    """Returns how far the run came, by its end or by its last row that says so; None where none does."""
    at_end = run.section("finished").get("consumed_samples")
    if isinstance(at_end, int):
        return run.num_steps, at_end
    counted, samples = run.column("samples vs steps")
    return (int(counted[-1]), int(samples[-1])) if counted else (run.num_steps, None)


def _speed_tile(run: Run, per_step: int) -> list[Tile]:
    """Returns the median speed that was logged, or that of full packs; none where no step was timed."""
    _, seconds = run.column("iteration-time")
    if not seconds:
        return []
    middle = float(np.median(seconds))
    _, logged = run.column("tokens-per-second")
    speed = float(np.median(logged)) if logged else per_step / max(middle, 1e-9)
    world = run.section("layout").get("world_size")
    words = (
        f"step of {plain(middle)} s on {world} rank{'' if world == 1 else 's'}, medians; measured"
    )
    padding = ", padding excluded" if logged else ""
    return [Tile("Tokens per second", exact(round(speed)), words + padding)]
