"""Planned batches for one data-parallel rank, built ahead by workers, resumable exactly.

    every rank alike, integers only                          |  workers, or inline
    documents -> Packer -> packs of a global batch           |  tokens, labels, mask
              -> shared out to ranks by predicted time       |  -> make_plans -> PlannedBatch

Packs are drawn before they are shared out. So the packs of a global batch, and with them the state,
do not depend on the number of ranks or workers: either may change between two runs.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp.data.balance import assign_in_order, assign_packs
from megatron_cp.data.batch import BatchConfig, PlannedBatch, PlanRequest
from megatron_cp.data.batch_schedule import BatchSchedule, as_schedule
from megatron_cp.data.blend import make_packer
from megatron_cp.data.document_set import Documents
from megatron_cp.data.fill_in_the_middle import check_rearrangeable
from megatron_cp.data.hybrid import BothLayouts, HybridBuilder, choose_layout
from megatron_cp.data.one_epoch import OneEpoch
from megatron_cp.data.pack_cost import pack_area, pack_seconds
from megatron_cp.data.packing import Pack, PackingConfig, PackSource
from megatron_cp.data.worker import BatchBuilder, Builder, Built, WorkerProcess

_STATE_VERSION = 1
# What a state says by a digest, and what may be another where that is.
_OF_DIGESTS = {
    "corpus": "files, --split or weights of corpora",
    "index": "order of samples (--split, corpora, or how many are asked for: --train-iters)",
}


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """What is in a pack, how it becomes arrays, how many packs a step takes, and who builds them.

    `global_batch_size` counts packs over all data-parallel ranks; a schedule says it by the packs
    consumed. They are dealt to ranks and micro-batches by the predicted time of their attention, or with
    `balance=False` in order, as Megatron deals samples. `spans_replicas`: the micro-batches that all
    ranks compute at the same time may be planned as one (`hybrid.py`).
    """

    packing: PackingConfig
    batch: BatchConfig
    global_batch_size: int | BatchSchedule
    micro_batch_size: int = 1
    balance: bool = True
    spans_replicas: bool = False
    num_workers: int = 0
    worker_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.batch.seq_length != self.packing.seq_length:
            raise ValueError(
                f"batch.seq_length={self.batch.seq_length} must equal packing.seq_length="
                f"{self.packing.seq_length}; give both the same"
            )
        if self.micro_batch_size < 1:
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} must be at least 1; set "
                "--micro-batch-size"
            )
        if isinstance(self.global_batch_size, int) and self.global_batch_size < 1:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} must be at least 1; set "
                "--global-batch-size"
            )
        if self.num_workers < 0:
            raise ValueError(
                f"num_workers={self.num_workers} must be at least 0; 0 builds batches inline"
            )


@dataclass
class _Task:
    """The packs of one micro-batch; `state_after` is set on the last one of a global batch.

    Where batches span replicas, those of all replicas, replica after replica.
    """

    packs: tuple[Pack, ...]
    state_after: dict[str, Any] | None


class PackedLoader:
    """An iterator of `PlannedBatch`, endless as its packer is, `num_microbatches` of them per training step.

    All ranks of a data-parallel replica (context, tensor, pipeline) make the same loader with the
    same `dp_rank` and get the same batches and plan bytes, without communication. No collective.

    Packs come from `packer`, if given, instead of the one that `config.packing` describes.

    Raises:
        ValueError: settings that cannot work, before any worker starts.
    """

    def __init__(
        self,
        documents: Documents,
        config: LoaderConfig,
        request: PlanRequest | None = None,
        *,
        packer: PackSource | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank={dp_rank} must be in [0, {dp_size}); check dp_size")
        self._sizes = as_schedule(config.global_batch_size)
        for size in self._sizes.sizes():
            if size % (dp_size * config.micro_batch_size):
                raise ValueError(
                    f"global_batch_size={size} must be a multiple of dp_size * micro_batch_size = "
                    f"{dp_size} * {config.micro_batch_size}; change --global-batch-size or "
                    "--micro-batch-size"
                )
        if documents.prefix_lengths.any() and not config.batch.reset_attention_mask:
            first = int((documents.prefix_lengths != 0).argmax())
            raise ValueError(
                f"reset_attention_mask=False: {documents.name(first)} "
                "has prefix or bidirectional attention; set --reset-attention-mask"
            )
        if config.batch.fim is not None:
            check_rearrangeable(documents)
        self.config = config
        self._documents, self._dp_rank, self._dp_size = documents, dp_rank, dp_size
        self._packer = packer if packer is not None else make_packer(documents, config.packing)
        self._request = request or PlanRequest()
        self._builder: Builder = BatchBuilder(documents, config.batch, self._request)
        if config.spans_replicas:
            self._builder = HybridBuilder(documents, config.batch, self._request, dp_rank, dp_size)
        self._ready: collections.deque[tuple[_Task, PlannedBatch]] = collections.deque()
        self._corpus = documents.digest()
        self._workers: list[WorkerProcess] = []
        self._in_flight: collections.deque[tuple[WorkerProcess, _Task]] = collections.deque()
        self._closed = False
        self._begin(self._packer.state(), 0)

    def _begin(self, packer_state: dict[str, Any], consumed_samples: int) -> None:
        self._consumed_samples = consumed_samples
        self._resume_at: dict[str, Any] | None = packer_state
        self._tasks = self._draw_tasks()

    def _draw_tasks(self) -> Iterator[_Task]:
        consumed = self._consumed_samples
        while True:
            size = self._sizes.size_at(consumed)
            packs = [
                replace(pack, number=number)
                for number, pack in enumerate(itertools.islice(self._packer, size), start=consumed)
            ]
            if len(packs) < size:
                return
            consumed += size
            state = self._packer.state()
            dealt = self._deal(packs)
            mine = dealt[self._dp_rank]
            if self.config.spans_replicas:
                mine = [list(itertools.chain(*together)) for together in zip(*dealt, strict=True)]
            for number, chosen in enumerate(mine, start=1):
                last = number == len(mine)
                yield _Task(tuple(packs[i] for i in chosen), state if last else None)

    def _deal(self, packs: list[Pack]) -> list[list[list[int]]]:
        dp_size, micro_batch_size = self._dp_size, self.config.micro_batch_size
        if not self.config.balance:
            return assign_in_order(len(packs), dp_size=dp_size, micro_batch_size=micro_batch_size)
        documents, batch, request = self._documents, self.config.batch, self._request
        return assign_packs(
            [pack_seconds(documents, pack, batch, request) for pack in packs],
            areas=[pack_area(documents, pack, batch, request) for pack in packs],
            dp_size=dp_size,
            micro_batch_size=micro_batch_size,
        )

    def __iter__(self) -> Iterator[PlannedBatch]:
        return self

    def __next__(self) -> PlannedBatch:
        """Returns the next micro-batch.

        Raises:
            ValueError: the data is wrong (names file and document), or a packer that ends has no
                whole global batch left.
            NotImplementedError: the planner cannot plan the packs.
            WorkerError: a worker died or hangs (names it); the loader is closed then.
        """
        if self._closed:
            raise RuntimeError("this loader is closed; make a new one")
        try:
            if not self._ready:
                self._ready.extend(self._take())
        except BaseException:
            self.close()  # no worker outlives an error
            raise
        task, batch = self._ready.popleft()
        self._resume_at = task.state_after
        if task.state_after is not None:
            self._consumed_samples += self._sizes.size_at(self._consumed_samples)
        return batch

    def _take(self) -> Iterable[tuple[_Task, PlannedBatch]]:
        """Returns the next micro-batch, or those of a whole step, whose layout is chosen at once."""
        task, built = self._next()
        if isinstance(built, PlannedBatch):
            return [(task, built)]
        tasks, step = [task], [built]
        while tasks[-1].state_after is None:
            task, built = self._next()
            assert isinstance(built, BothLayouts)
            tasks.append(task)
            step.append(built)
        return zip(tasks, choose_layout(step), strict=True)

    def _next(self) -> tuple[_Task, Built]:
        return self._receive() if self.config.num_workers else self._build_inline()

    def _build_inline(self) -> tuple[_Task, Built]:
        task = next(self._tasks, None)
        if task is None:
            raise self._end()
        return task, self._builder(task.packs)

    def _receive(self) -> tuple[_Task, Built]:
        while len(self._workers) < self.config.num_workers:
            index, timeout_s = len(self._workers), self.config.worker_timeout_s
            worker = WorkerProcess(index, self._builder, timeout_s=timeout_s)
            self._workers.append(worker)
            self._submit(worker)
        if not self._in_flight:
            raise self._end()
        worker, task = self._in_flight.popleft()
        batch = worker.receive()
        self._submit(worker)  # the next batch is built while this one is trained on
        return task, batch

    def _submit(self, worker: WorkerProcess) -> None:
        if (task := next(self._tasks, None)) is not None:
            worker.submit(task.packs)
            self._in_flight.append((worker, task))

    def _end(self) -> ValueError:
        return ValueError(
            f"the samples end after {self._consumed_samples}, no global batch of "
            f"{self._sizes.size_at(self._consumed_samples)} is left; give more documents or fewer "
            "--train-iters"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns where the stream stands, in JSON values: equal on all ranks, between two steps.

        Raises:
            RuntimeError: in the middle of a global batch.
        """
        if self._resume_at is None:
            raise RuntimeError(
                f"state_dict() between the {self.num_microbatches} micro-batches of a step; take "
                "the step's remaining batches first"
            )
        return {
            "version": _STATE_VERSION,
            **self._identity(),
            **self._resume_at,
            "consumed_samples": self._consumed_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the stream of `state`: the very batches that would have come next.

        The number of data-parallel ranks, of workers, and both batch sizes may differ.

        Raises:
            ValueError: the state is of another corpus, sequence length, seed or packing.
        """
        wanted = {"version": _STATE_VERSION, **self._identity()}
        # Digests come last: a number that differs says more.
        for name in sorted(wanted, key=_OF_DIGESTS.__contains__):
            if state.get(name) != wanted[name]:
                differs = f"{name}={state.get(name)!r}, this run has {wanted[name]!r}"
                if name in _OF_DIGESTS:
                    differs = f"this run has another {name}, that is other {_OF_DIGESTS[name]}"
                raise ValueError(
                    f"loader state: {differs}; resume with the data and flags of the checkpoint, or begin anew with "
                    "its weights (--finetune)"
                )
        try:
            packer_state = {name: state[name] for name in self._packer.state()}
            consumed = int(state["consumed_samples"])
            self._packer.restore(packer_state)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"loader state is damaged ({error!r}); use another checkpoint"
            ) from None
        self._stop_workers()  # what they were building belongs to the old place
        self._begin(packer_state, consumed)

    def skip(self, num_packs: int) -> None:
        """Goes from the beginning to behind so many packs of all ranks, as if they had been trained on."""
        self._stop_workers()
        collections.deque(itertools.islice(self._packer, num_packs), maxlen=0)
        self._begin(self._packer.state(), num_packs)

    def _identity(self) -> dict[str, Any]:
        return {"corpus": self._corpus, **self._packer.identity()}

    @property
    def request(self) -> PlanRequest:
        """Which plans a replica's batches have."""
        return self._request

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the step that comes next, or is being taken."""
        size = self._sizes.size_at(self._consumed_samples)
        return size // (self._dp_size * self.config.micro_batch_size)

    @property
    def num_batches(self) -> int | None:
        """Global batches of a packer of one epoch, from its beginning; None for any other."""
        if not isinstance(self._packer, OneEpoch):
            return None
        return len(self._packer) // self._sizes.size_at(0)

    @property
    def consumed_samples(self) -> int:
        """Packs of all ranks in the steps completed so far."""
        return self._consumed_samples

    def _stop_workers(self) -> None:
        self._in_flight.clear()
        self._ready.clear()
        while self._workers:
            self._workers.pop().close()

    def close(self) -> None:
        """Ends the workers; safe to call twice."""
        self._closed = True
        self._stop_workers()

    def __enter__(self) -> PackedLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
