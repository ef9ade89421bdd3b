"""What a run trained, in numbers: tokens, losses as perplexity and bits per byte, and what guessing would score."""

from __future__ import annotations

import math

import numpy as np

from megatron_cp.report.draw.html import Tile
from megatron_cp.report.draw.svg import count_of, exact, plain, short
from megatron_cp.report.run.health import tenth
from megatron_cp.report.run.record import HELD_OUT_LOSS, LOSS, Run


def trained_tiles(run: Run) -> list[Tile]:
    """Returns the tiles of the losses and of how much was read."""
    tiles = []
    losses = np.array(run.column(LOSS)[1])
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
    _, held_out = run.column(HELD_OUT_LOSS)
    if held_out:
        tiles.append(
            Tile("Held-out loss", f"{held_out[-1]:.3f}", held_out_words(run, held_out[-1]))
        )
    return [*tiles, *_amount_tiles(run)]


def held_out_words(run: Run, loss: float) -> str:
    """Returns a held-out loss in other units, beside that of a model that knows nothing."""
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
    sizes = (run.argument(name) for name in ("vocab_size", "padded_vocab_size"))
    return next(
        (n for n in sizes if isinstance(n, int) and not isinstance(n, bool) and n > 1), None
    )


def tokens_per_step(run: Run) -> int | None:
    """Returns the tokens of a global batch, as the arguments say it; None where they do not."""
    batch, seq_length = run.argument("global_batch_size"), run.argument("seq_length")
    return batch * seq_length if isinstance(batch, int) and isinstance(seq_length, int) else None


def _amount_tiles(run: Run) -> list[Tile]:
    """Returns how much was read, and how fast."""
    _, seconds = run.column("iteration-time")
    per_step = tokens_per_step(run)
    if per_step is None:
        return []
    steps = int(run.rows[-1]["iteration"]) if run.rows else 0
    detail = f"{count_of(steps, 'step')} of {per_step:,}, packs full"
    train = run.section("data").get("train")
    total = train.get("tokens") if isinstance(train, dict) else None
    if isinstance(total, int) and total > 0:
        detail += f"; {steps * per_step / total:.2f} × the training documents"
    tiles = [Tile("Tokens read", exact(steps * per_step), detail)]
    if seconds:
        middle = float(np.median(seconds))
        world = run.section("layout").get("world_size")
        words = (
            f"median step {plain(middle)} s on {world} rank{'' if world == 1 else 's'}, measured"
        )
        tiles.append(Tile("Tokens per second", exact(round(per_step / max(middle, 1e-9))), words))
    return tiles
