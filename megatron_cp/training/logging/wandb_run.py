"""The run in wandb: what it is called, which values count, alerts, pictures and tables.

Without a key it runs offline and never asks; what it is told is what may be written down (loggable.py). Whatever goes
wrong with it is a warning, it is left out from then on, and training goes on.
"""

from __future__ import annotations

import netrc
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

from megatron_cp.loggable_text import loggable_text
from megatron_cp.training import exit_signal
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.lines import print_rank_last, warn
from megatron_cp.training.logging.loggable import loggable_arguments
from megatron_cp.training.logging.spikes import GradientSpikes

WandbMode = Literal["online", "offline", "disabled"]
_HOMES = ("/home", "/Users")
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
# Of what a table of runs shows the least, or the most, in place of the last value.
BEST = {
    "lm loss": "min",
    "lm loss validation": "min",
    "iteration-time": "min",
    "throughput": "max",
    "cp/area_max_over_mean": "mean",
    "cp/comm_bytes_sent": "mean",
}
QUIET_SECONDS = 600  # between two alerts of one title


class ShownTable(Protocol):
    """Columns and rows of a table."""

    @property
    def columns(self) -> Sequence[str]:
        """Returns the names of the columns."""

    @property
    def rows(self) -> Sequence[Sequence[object]]:
        """Returns the rows."""


class Media(Protocol):
    """What is shown beside numbers, by key: pages and pictures as HTML, and tables."""

    @property
    def pages(self) -> Mapping[str, str]:
        """Returns HTML that fetches nothing."""

    @property
    def tables(self) -> Mapping[str, ShownTable]:
        """Returns tables."""


MakeMedia = Callable[[], Media]


class WandbRun:
    """A run of wandb that never stops training."""

    def __init__(self, run: Any, num_steps: int = 0) -> None:
        """`run`: what `wandb.init` returned; `num_steps`: of the whole run."""
        self._run = run
        self._spikes = GradientSpikes(num_steps)

    @property
    def offline_folder(self) -> str | None:
        """What `wandb sync` takes, for a run that wandb keeps on this machine; None otherwise."""
        settings = getattr(self._run, "settings", None)
        is_offline = getattr(settings, "mode", None) == "offline"
        folder = getattr(settings, "sync_dir", None) if is_offline else None
        return None if folder is None else str(folder)

    @property
    def run_id(self) -> str | None:
        """What wandb calls the run; None where it has stopped working."""
        run_id = getattr(self._run, "id", None)
        return None if run_id is None else str(run_id)

    def tell_kept_steps(self, iteration: int) -> None:
        """Says which steps behind `iteration` wandb has from before and takes no second time: it drops their rows."""
        resumed, newest = getattr(self._run, "resumed", False), getattr(self._run, "step", 0) - 1
        if resumed and newest > iteration:
            print_rank_last(
                f" note: wandb keeps its rows of steps {iteration + 1} to {newest}, from before this start, and takes "
                "none for them again; the records of --run-dir have those of this start"
            )

    def log(self, numbers: Mapping[str, float], iteration: int) -> None:
        """One row of metrics; a gradient norm in it that stands out is an alert too."""
        self._try(lambda: self._run.log(dict(numbers), step=iteration))
        spike = self._spikes.told(iteration, numbers)
        if spike is not None:
            self.alert("the gradient norm stands out", spike)

    def alert(self, title: str, text: str) -> None:
        """A message to whoever watches the run; at most one of a title in ten minutes."""
        self._try(lambda: self._run.alert(title=title, text=text, wait_duration=QUIET_SECONDS))

    def show(self, make_media: MakeMedia) -> None:
        """Pages, pictures and tables, in the last row of the run."""

        def log() -> None:
            import wandb

            media = make_media()
            shown: dict[str, Any] = {
                key: wandb.Html(page, inject=False) for key, page in media.pages.items()
            }
            for key, table in media.tables.items():
                shown[key] = wandb.Table(
                    columns=list(table.columns), data=[list(row) for row in table.rows]
                )
            self._run.log(shown)

        self._try(log)

    def finish(self) -> None:
        """Waits until everything is written."""
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as problem:  # a tracker never stops a run
                warn(f"wandb did not finish: {problem}")

    def _try(self, tell: Callable[[], None]) -> None:
        if self._run is None:
            return
        try:
            tell()
        except Exception as problem:  # as above
            warn(f"wandb stopped working and is left out from now on: {problem}")
            self._run = None


def start_wandb(
    config: TrainConfig, folder: Path, environment: Mapping[str, str] | None = None
) -> WandbRun | None:
    """Returns a wandb run whose files lie in `folder`; None, with a warning, if it cannot start.

    WANDB_RUN_GROUP, WANDB_TAGS, WANDB_NOTES and the like are heeded by wandb itself. Without the first, runs in
    folders side by side are a group.
    """
    options = config.records
    if not options.wandb:
        return None
    mode = wandb_mode(os.environ if environment is None else environment)
    try:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        # The command line, the console, the git remote and the machine's name do not go through our list, so wandb
        # does not collect them.
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            host=os.environ.get("WANDB_HOST", ""),
        )
        with exit_signal.held_back():  # wandb's own process lives as long as the run
            run = wandb.init(
                # wandb puts a folder of that name into it.
                dir=str(folder.parent if folder.name == "wandb" else folder),
                project=options.wandb_project or "megatron_cp",
                name=options.wandb_exp_name or _name_of_folder(config),
                entity=options.wandb_entity,
                id=options.wandb_run_id,
                resume="allow" if options.wandb_run_id else None,
                group=None if os.environ.get("WANDB_RUN_GROUP") else group_of(config),
                job_type="pretrain",
                tags=None if os.environ.get("WANDB_TAGS") else tags_of(config),
                config=loggable_arguments(config.arguments),
                mode=mode,
                settings=settings,
            )
        sets = config.steps.validation_set_names or ()
        named = {f"lm loss validation-{name}": "min" for name in sets}
        for key, best in (BEST | named).items():
            run.define_metric(key, summary=best)
        return WandbRun(run, config.steps.train_iters)
    except ModuleNotFoundError as missing:
        warn(f"wandb is not used: {missing}; pip install wandb, or give --no-wandb")
    except Exception as problem:  # a tracker never stops a run
        warn(f"wandb is not used: {problem}")
    return None


def tags_of(config: TrainConfig) -> list[str]:
    """Returns what runs are told apart by: the parallel layout and the planner."""
    parallel = config.parallel
    sizes = {
        "CP": parallel.context_parallel_size,
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "DP": parallel.data_parallel_size,
    }
    return [
        *(f"{name} {size}" for name, size in sizes.items()),
        f"planner {config.arguments['cp_planner']}",
    ]


def group_of(config: TrainConfig) -> str | None:
    """Returns the name of the folder that holds the run's folder: runs that lie side by side are one group.

    None for folders that hold more than such runs, and for those whose name is a user's.
    """
    if not config.records.run_dir:
        return None
    folder = Path(config.records.run_dir).parent
    name = "" if _is_a_place_for_all(folder) else folder.name
    return name if name not in ("", "..") and loggable_text(name) == name else None


def _is_a_place_for_all(folder: Path) -> bool:
    """Returns whether a folder is a home, above the user's, named like it, or for temporary files."""
    home = Path(os.path.expanduser("~")).resolve()  # noqa: PTH111  Path.home() raises for a user without one
    temporary = [Path(one).resolve() for one in (*_TEMPORARY, tempfile.gettempdir())]
    return any(
        place in (home, *home.parents, *temporary)
        or place.name == home.name
        or str(place.parent) in _HOMES
        for place in (folder.absolute(), folder.resolve())  # homes may be links
    )


def _name_of_folder(config: TrainConfig) -> str | None:
    """Returns the run folder's name; None leaves it to wandb."""
    return Path(config.records.run_dir).name if config.records.run_dir else None


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
