"""How large the logits of a rank are, told where they are large: at long contexts runs end there out of memory."""

from __future__ import annotations

from megatron_cp.training.config import TrainConfig

_LARGE = 4e9  # bytes
_ROWS = 4096  # enough for a GPU's full speed; fewer where they are large themselves


def with_note_of_logits(config: TrainConfig) -> TrainConfig:
    """Returns the configuration with a note where a rank will hold more than 4 GB of logits at once."""
    tensor = config.parallel.tensor_model_parallel_size
    rows = config.data.seq_length * config.steps.micro_batch_size
    rows = -(-rows // config.parallel.context_parallel_size)
    size_of_row = config.data.padded_vocab_size // tensor * config.model.dtype.itemsize
    if config.model.loss_chunk_size is not None or rows * size_of_row <= _LARGE:
        return config
    at_once = _ROWS
    while at_once * size_of_row > _LARGE / 2:
        at_once //= 2
    return config.with_note(
        f"the logits of a micro-batch take {rows * size_of_row / 1e9:.1f} GB on a rank, and their gradients as much; "
        f"--loss-chunk-size {at_once} holds {at_once} of {rows} rows at once, {at_once * size_of_row / 1e9:.1f} GB "
        "(docs/memory.md)"
    )
