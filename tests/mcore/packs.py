"""The data of the tiny GPT: packs of counting sequences, with plans as the data loader makes them."""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

VOCABULARY = 64
SEQUENCE = 128


@dataclass(frozen=True)
class Pack:
    """What `data.batch.PackedBatch` holds, as far as the model needs it."""

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    lengths: tuple[int, ...]

    @property
    def rope_positions(self) -> np.ndarray:
        return self.position_ids


def losses(model, inputs, attention_mask=None):
    """The output of a stage for a rank's rows; on the last one the loss of each."""
    return model(
        inputs.tokens,
        inputs.position_ids,
        attention_mask,
        labels=inputs.labels,
        packed_seq_params=inputs.params,
        loss_mask=inputs.loss_mask,
    )


def endless_packs(is_packed: bool):
    """Endless packs: counting sequences of random start and step; odd lengths when packed."""
    random = np.random.default_rng(3)
    while True:
        lengths = [SEQUENCE]
        if is_packed:
            cuts = np.sort(random.choice(np.arange(1, SEQUENCE), size=4, replace=False))
            lengths = np.diff([0, *cuts, SEQUENCE]).tolist()
        parts = []
        for length in lengths:
            start, step = random.integers(VOCABULARY), random.integers(1, 4)
            parts.append((start + step * np.arange(length + 1)) % VOCABULARY)
        loss_mask = np.ones(SEQUENCE, np.float32)
        loss_mask[random.random(SEQUENCE) < 0.3] = 0.0
        loss_mask[: random.integers(SEQUENCE // 2)] = (
            0.0  # ranks hold unequal numbers of loss tokens
        )
        yield Pack(
            tokens=np.concatenate([part[:-1] for part in parts]),
            labels=np.concatenate([part[1:] for part in parts]),
            loss_mask=loss_mask,
            position_ids=np.concatenate([np.arange(length) for length in lengths]),
            lengths=tuple(lengths),
        )


def planned(case, config, pack: Pack) -> SimpleNamespace:
    """The pack with its plans, as the data loader makes it."""
    from megatron_cp.config import CPConfig

    settings = CPConfig(
        planner=case.planner,
        num_heads=config.num_attention_heads // case.tp,
        num_kv_heads=max(1, config.num_query_groups // case.tp),
        head_dim=config.kv_channels,
        topology="cpu",
        element_bytes=4,
        token_multiple=case.tp if case.sequence_parallel else 1,
    )
    return SimpleNamespace(
        batch=pack, plans=plans_of(pack.lengths, config.window_size, case.cp, settings)
    )


@functools.cache
def plans_of(lengths: tuple[int, ...], window: tuple[int, int] | None, cp: int, settings) -> dict:
    from megatron_cp.mask import packed
    from megatron_cp.plan.planner import make_plans

    masks = {"full": (packed.documents(lengths), 1.0)}
    if window is not None:
        within = [("window", window[0], 0)] * len(lengths)
        masks["window"] = (packed.documents(lengths, within=within), 1.0)
    return make_plans(masks, cp, settings)


def dense_mask(lengths: tuple[int, ...]) -> torch.Tensor:
    """Megatron's own form, [1, 1, S, S], True = hidden: each document by itself, causal."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    hidden = (document[:, None] != document[None, :]) | np.triu(
        np.ones((len(document),) * 2, bool), 1
    )
    return torch.from_numpy(hidden)[None, None]
