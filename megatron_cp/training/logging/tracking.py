"""Where metrics go: wandb, tensorboard and the run's own files.

One rank sends them: the last, which holds the loss. wandb is logged whether or not tensorboard is on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
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
        self,
        *,
        wandb_run: WandbRun | None = None,
        writer: TensorboardFiles | None = None,
        files: Any = None,
    ) -> None:
        """The sinks: a wandb run, `TensorboardFiles`, `records.RunFiles`; each may be None."""
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
                self._writer.log(numbers, iteration, samples)
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


class TensorboardFiles:
    """What tensorboard reads: values by iteration, and in a folder below by samples.

    A run that goes on hides what lies behind its checkpoint, as it comes again. Tensorboard hides from a step on, in
    all curves of a folder; hence one for each kind of step.
    """

    def __init__(self, by_iteration: Any, by_samples: Any) -> None:
        self._by_iteration, self._by_samples = by_iteration, by_samples

    def log(self, numbers: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """Adds a point to each curve."""
        for key, value in numbers.items():
            self._by_iteration.add_scalar(key, value, iteration)
            if samples is not None:
                self._by_samples.add_scalar(f"{key} vs samples", value, samples)

    def close(self) -> None:
        """Writes what is left."""
        self._by_iteration.close()
        self._by_samples.close()


def start_tensorboard(config: TrainConfig, iteration: int, samples: int) -> TensorboardFiles | None:
    """Returns tensorboard's files of a run that stands here, where `--tensorboard-dir` is given; otherwise None.

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
    # An evaluation beside a training leaves its curves as they are.
    first_hidden = (None, None) if config.steps.skip_train else (iteration + 1, samples + 1)
    folder = Path(options.tensorboard_dir)
    by_iteration, by_samples = (
        SummaryWriter(
            log_dir=str(place), max_queue=options.tensorboard_queue_size, purge_step=purge_step
        )
        for place, purge_step in zip((folder, folder / "by_samples"), first_hidden, strict=True)
    )
    for name, value in loggable_arguments(config.arguments).items():
        by_iteration.add_text(name, str(value))
    return TensorboardFiles(by_iteration, by_samples)
