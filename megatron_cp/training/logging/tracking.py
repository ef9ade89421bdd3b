"""Where metrics go: wandb, tensorboard and the run's own files.

One rank sends them: the last, which holds the loss.

wandb is logged whether or not tensorboard is on. Without a key it runs offline and never asks; what
it is told is what may be written down (loggable.py); whatever goes wrong with it is a warning, and training goes on.
"""

from __future__ import annotations

import netrc
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from megatron_cp.training import exit_signal
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.loggable import loggable_arguments

WandbMode = Literal["online", "offline", "disabled"]


class Tracker:
    """Sends rows to the sinks that are there. Every method is safe to call on every rank.

    Without sinks it does nothing.
    """

    def __init__(self, *, wandb_run: Any = None, writer: Any = None, files: Any = None) -> None:
        """The sinks: a wandb run, a tensorboard writer, `records.RunFiles`; each may be None."""
        self._wandb, self._writer, self._files = wandb_run, writer, files

    def log(self, iteration: int, row: Mapping[str, Any], *, samples: int | None = None) -> None:
        """One row of metrics at `iteration`.

        Tensorboard gets "<key> vs samples" too, as in Megatron-LM.
        """
        if self._files is not None:
            self._files.log({"iteration": iteration, **row})
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        if self._wandb is not None:
            try:
                self._wandb.log(numbers, step=iteration)
            except Exception as problem:  # a tracker never stops a run
                warnings.warn(
                    f"wandb stopped working and is left out from now on: {problem}", stacklevel=2
                )
                self._wandb = None
        if self._writer is not None:
            for key, value in numbers.items():
                self._writer.add_scalar(key, value, iteration)
                if samples is not None:
                    self._writer.add_scalar(f"{key} vs samples", value, samples)

    def add_plan_sample(self, sample: dict[str, Any]) -> None:
        """One pack for the report."""
        if self._files is not None:
            self._files.add_plan_sample(sample)

    @property
    def wants_plan_samples(self) -> bool:
        """Whether somebody keeps packs for the report."""
        return self._files is not None

    @property
    def offline_folder(self) -> str | None:
        """What `wandb sync` takes, for a run that wandb keeps on this machine; None otherwise."""
        settings = getattr(self._wandb, "settings", None)
        is_offline = getattr(settings, "mode", None) == "offline"
        folder = getattr(settings, "sync_dir", None) if is_offline else None
        return None if folder is None else str(folder)

    def finish(self, summary: dict[str, Any]) -> None:
        """Closes every sink."""
        if self._files is not None:
            self._files.finish(summary)
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            try:
                self._wandb.finish()
            except Exception as problem:  # as above
                warnings.warn(f"wandb did not finish: {problem}", stacklevel=2)


def wandb_mode(environment: Mapping[str, str]) -> WandbMode:
    """Returns `online` only with a key at hand, `offline` otherwise.

    WANDB_MODE is respected unless it would ask for a key.
    """
    wish = environment.get("WANDB_MODE", "").lower()
    if environment.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return "disabled"
    if wish == "disabled":
        return "disabled"
    if wish in ("offline", "dryrun"):
        return "offline"
    return "online" if _has_key(environment) else "offline"


def _has_key(environment: Mapping[str, str]) -> bool:
    """Returns whether wandb would find a login without asking."""
    if environment.get("WANDB_API_KEY"):
        return True
    host = (
        urlparse(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
        or "api.wandb.ai"
    )
    for name in (environment.get("NETRC"), "~/.netrc", "~/_netrc"):
        path = Path(name).expanduser() if name else None
        if path is None or not path.is_file():
            continue
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (netrc.NetrcParseError, OSError):
            continue
    return False


def start_wandb(
    config: TrainConfig, folder: Path, environment: Mapping[str, str] | None = None
) -> Any:
    """Returns a wandb run whose files lie in `folder`; None, with a warning, if it cannot start."""
    options = config.records
    if not options.wandb:
        return None
    mode = wandb_mode(os.environ if environment is None else environment)
    try:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        # The command line, the console and the git remote do not go through our list, so wandb does not
        # collect them.
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        with exit_signal.held_back():  # wandb's own process lives as long as the run
            return wandb.init(
                dir=str(folder),
                project=options.wandb_project or "megatron_cp",
                name=options.wandb_exp_name,
                entity=options.wandb_entity,
                id=options.wandb_run_id,
                resume="allow" if options.wandb_run_id else None,
                config=loggable_arguments(config.arguments),
                mode=mode,
                settings=settings,
            )
    except Exception as problem:  # a tracker never stops a run
        warnings.warn(f"wandb is not used: {problem}", stacklevel=2)
        return None


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
        warnings.warn("--tensorboard-dir is not used: install tensorboard", stacklevel=2)
        return None
    writer = SummaryWriter(
        log_dir=options.tensorboard_dir, max_queue=options.tensorboard_queue_size
    )
    for name, value in loggable_arguments(config.arguments).items():
        writer.add_text(name, str(value))
    return writer
