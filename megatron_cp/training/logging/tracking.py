"""Where metrics go: wandb, tensorboard and the run's own files.

One rank sends them: the last, which holds the loss. wandb is logged whether or not tensorboard is on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.lines import told_if_refused, warn
from megatron_cp.training.logging.loggable import loggable_arguments
from megatron_cp.training.logging.wandb_run import MakeMedia, WandbRun


class Tracker:
    """Sends rows to the sinks that are there. Every method is safe to call on every rank.

    Without sinks it does nothing.
    """

    def __init__(
        self, *, wandb_run: WandbRun | None = None, writer: Any = None, files: Any = None
    ) -> None:
        """The sinks: a wandb run, a tensorboard writer, `records.RunFiles`; each may be None."""
        self._wandb, self._writer, self._files = wandb_run, writer, files
        self._is_refused = False

    def log(self, iteration: int, row: Mapping[str, Any], *, samples: int | None = None) -> None:
        """One row of metrics at `iteration`.

        Tensorboard gets "<key> vs samples" too, as in Megatron-LM.
        """
        self._record(lambda files: files.log({"iteration": iteration, **row}))
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        if self._wandb is not None:
            self._wandb.log(numbers, iteration)
        if self._writer is not None:
            try:
                for key, value in numbers.items():
                    self._writer.add_scalar(key, value, iteration)
                    if samples is not None:
                        self._writer.add_scalar(f"{key} vs samples", value, samples)
            except OSError as problem:  # its thread's, which has ended then
                self._writer = None
                warn(f"tensorboard's files could not be written: {problem}; it gets no more")

    def alert(self, title: str, text: str) -> None:
        """Tells those who watch the run that something needs them."""
        if self._wandb is not None:
            self._wandb.alert(title, text)

    def add_plan_sample(self, sample: dict[str, Any]) -> None:
        """One pack for the report."""
        self._record(lambda files: files.add_plan_sample(sample))

    def add_texts(self, rows: list[dict[str, Any]]) -> None:
        """Samples of text for the report."""
        self._record(lambda files: files.add_texts(rows))

    def _record(self, write: Callable[[Any], None]) -> None:
        """Writes into the run's own files; what a disk refuses is left out, and told until it takes something again."""
        if self._files is None:
            return
        try:
            write(self._files)
        except OSError as problem:
            if not self._is_refused:
                warn(
                    f"the run's records could not be written: {problem}; training goes on without them"
                )
            self._is_refused = True
        else:
            self._is_refused = False

    @property
    def num_wanted_plan_samples(self) -> int:
        """How many more packs are kept for the report."""
        return 0 if self._files is None else self._files.num_wanted_plan_samples

    @property
    def offline_folder(self) -> str | None:
        """What `wandb sync` takes, for a run that wandb keeps on this machine; None otherwise."""
        return None if self._wandb is None else self._wandb.offline_folder

    @property
    def wandb_run_id(self) -> str | None:
        """What `--wandb-run-id` takes to go on with this run in wandb; None without one."""
        return None if self._wandb is None else self._wandb.run_id

    def finish(self, summary: dict[str, Any], make_media: MakeMedia | None = None) -> None:
        """Closes every sink; `make_media` gives wandb what it shows beside numbers, once the files are complete."""
        self._record(lambda files: files.finish(summary))
        if self._writer is not None:
            with told_if_refused("the end of tensorboard's files"):
                self._writer.close()
        if self._wandb is not None:
            if make_media is not None and self._files is not None:
                self._wandb.show(make_media)
            self._wandb.finish()


def start_tensorboard(config: TrainConfig) -> Any:
    """Returns a tensorboard writer where `--tensorboard-dir` is given; otherwise None.

    None, with a warning, where the package is missing.
    """
    options = config.records
    if not options.tensorboard_dir:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn("--tensorboard-dir is not used: pip install tensorboard")
        return None
    writer = SummaryWriter(
        log_dir=options.tensorboard_dir, max_queue=options.tensorboard_queue_size
    )
    for name, value in loggable_arguments(config.arguments).items():
        writer.add_text(name, str(value))
    return writer
