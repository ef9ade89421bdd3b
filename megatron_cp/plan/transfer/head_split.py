"""Ulysses groups around any plan: plan for fewer, larger ranks, then split the heads inside each.

A *head group* stands for `degree` neighbouring ranks: member j of head group g is rank `g * degree + j`.
Members exchange tokens against heads first; then each does for its heads what the head group would do for
all of them, with the members at its place in the other groups.

    inner plan, 2 head groups       degree 2, 4 ranks
      tokens    [A B] [C D]           [A] [B] [C] [D]
      message   0 -> 1                0 -> 2 (heads of place 0),  1 -> 3 (heads of place 1)

Sources: USP (arXiv 2405.07719), LoongTrain's 2D attention (2406.18485).
"""

from dataclasses import replace
from itertools import chain

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.schema import DST, SRC, HeadSplit, Hop, Pass, Stage, Transfer


def fits_heads(degree: int, config: CPConfig) -> bool:
    """Returns whether query heads split `degree` ways with whole key/value heads per rank; latent rows have none."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if config.latent_dim is not None:
        return degree == 1
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def head_degrees(cp_size: int, config: CPConfig) -> list[int]:
    """Returns the head degrees that a plan on `cp_size` ranks may have, 1 first."""
    degrees = range(1, min(cp_size, config.num_heads) + 1)
    return [degree for degree in degrees if cp_size % degree == 0 and fits_heads(degree, config)]


def config_of_groups(config: CPConfig, degree: int) -> CPConfig:
    """Returns the config for planning head groups: their rows divide over `degree` members."""
    return replace(config, token_multiple=config.token_multiple * degree)


def split_heads(inner: Pass, degree: int) -> Pass:
    """Returns the pass of `degree` times as many ranks that runs `inner` once per share of heads.

    `inner` has no head split of its own. Its work masks are shared, not copied: O(messages x degree).
    """
    if degree == 1:
        return inner
    assert inner.head_split is None, "head splits do not nest: multiply their degrees"
    num_groups = len(inner.stages[0].work)
    groups = np.arange(num_groups * degree).reshape(num_groups, degree)
    stages = tuple(_split_stage(stage, degree) for stage in inner.stages)
    return Pass(stages, HeadSplit(tuple(map(tuple, groups.tolist()))))


def _split_stage(stage: Stage, degree: int) -> Stage:
    work = tuple(chain.from_iterable(zip(*[stage.work] * degree, strict=True)))
    k_cast, q_cast = (_split_transfer(cast, degree) for cast in (stage.k_cast, stage.q_cast))
    return replace(stage, work=work, k_cast=k_cast, q_cast=q_cast)


def _split_transfer(transfer: Transfer | None, degree: int) -> Transfer | None:
    if transfer is None:
        return None
    return Transfer(tuple(Hop(_split_messages(hop.messages, degree)) for hop in transfer.hops))


def _split_messages(messages: IntArray, degree: int) -> IntArray:
    """Returns every message once per share of heads: head groups (s, d) become ranks at the same place."""
    repeated = np.repeat(messages[None], degree, axis=0)
    places = np.arange(degree)[:, None]
    for end in (SRC, DST):
        repeated[:, :, end] = repeated[:, :, end] * degree + places
    return repeated.reshape(-1, 4)
