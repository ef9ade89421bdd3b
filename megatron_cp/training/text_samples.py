"""Samples of text: how the model goes on from the beginnings of held-out documents.

    one pack    [prompt | drawn so far | not yet][prompt | drawn so far | not yet] ...
                 every text is a document of its own; its mask is causal, so what comes later is not seen
    one token   forward on every rank -> logits of each text's last token -> one token each, drawn and appended

The forward is that of training, context parallelism included. Keys are not kept between tokens: a pack is short,
and its plan is made once. Nothing that training reads is changed: random states, buffers, loaders and optimizer are
as before. The noise of the draws is that of the seed and the text alone, so two evaluations differ by the model.
"""

# P texts, S tokens of the pack, T tokens of this rank, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from megatron_cp.data.batch import PackedBatch, PlannedBatch, PlanRequest, make_batch_plans
from megatron_cp.data.document_set import Documents
from megatron_cp.data.prompts import (
    NEW_TOKENS,
    Ids,
    Prompt,
    TextSample,
    choose_prompts,
    draw,
    text_behind,
)
from megatron_cp.data.tokenizer import Tokenizer
from megatron_cp.mask import documents as document_mask
from megatron_cp.training.bad_steps.probe import Before
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.corpora import RunData
from megatron_cp.training.step import Runner, whole_parameters, without_jitter

LogitsStep = Callable[[PlannedBatch, Any, torch.device], torch.Tensor]
"""Returns the logits of this rank's rows, `[T, V]`, the whole vocabulary on every tensor-parallel rank."""


def why_no_samples(config: TrainConfig, documents: Documents, limit: int | None) -> str | None:
    """Returns in words why this run can show no text; None if it can. `limit`: ids of the tokenizer."""
    stages = config.parallel.pipeline_model_parallel_size
    if stages > 1:
        return (
            f"the model lies on {stages} pipeline stages, and samples need all layers on every rank"
        )
    if config.model.mtp_num_layers:
        return "a model with multi-token prediction gives no logits without labels"
    if config.model.fp8:
        return "the packs of samples have not the sizes that fp8 layers need"
    if limit is None or config.data.mock_data:
        return "the run has no tokenizer that makes text of its tokens"
    if config.data.seq_length < 2 or not (documents.lengths >= 2).any():
        return "no pack has a document of two tokens"
    if np.any(documents.prefix_lengths):
        return "documents have prefixes that see both ways, and samples would be written under another mask"
    prompts = choose_prompts(documents, config.records.log_text_samples, config.data.seq_length)
    if any(max(one.ids.max(), one.follows.max()) >= limit for one in prompts):
        return "the token files are of another vocabulary than the tokenizer"
    return None


class TextSampler:
    """Writes the prompts of a run on, as often as it is asked to."""

    def __init__(
        self,
        runner: Runner,
        request: PlanRequest,
        prompts: Sequence[Prompt],
        split: str,
        tokenizer: Tokenizer,
        logits_step: LogitsStep,
    ) -> None:
        """Plans the pack. Not collective."""
        self._runner, self._prompts, self._split = runner, prompts, split
        self._tokenizer, self._logits_step = tokenizer, logits_step
        self._room = max(len(one.ids) for one in prompts) + NEW_TOKENS
        self._room = min(self._room, runner.config.data.seq_length)
        self._planned = _empty_pack(len(prompts), self._room, request)

    def sample(self, iteration: int) -> list[TextSample]:
        """Returns the texts as the model after `iteration` steps goes on. Collective: every rank calls it."""
        runner = self._runner
        before = Before.of(runner)
        for chunk in runner.model:
            chunk.eval()
        with torch.no_grad(), without_jitter(runner.model), whole_parameters(runner):
            written = self._write()
        for chunk in runner.model:
            chunk.train()
        before.restore(runner, 1)
        return [
            self._sample(iteration, prompt, ids)
            for prompt, ids in zip(self._prompts, written, strict=True)
        ]

    def _write(self) -> list[list[int]]:
        """Returns the new tokens of each text, the one that ends a document included."""
        prompts, eod = self._prompts, self._tokenizer.eod
        batch = self._planned.batch
        tokens_S = batch.tokens.copy()
        ids_PS = tokens_S[: len(prompts) * self._room].reshape(len(prompts), self._room)  # a view
        lengths = np.array([len(one.ids) for one in prompts])
        for row, one in zip(ids_PS, prompts, strict=True):
            row[: len(one.ids)] = one.ids
        written: list[list[int]] = [[] for _ in prompts]
        seed = self._runner.config.steps.seed
        noise = [np.random.default_rng([seed, one.document]) for one in prompts]
        while open_ := [
            p
            for p, ids in enumerate(written)
            if len(ids) < min(NEW_TOKENS, self._room - len(prompts[p].ids)) and eod not in ids[-1:]
        ]:
            self._runner.progress.tick()
            ends = np.arange(len(prompts)) * self._room + lengths - 1
            logits_PV = self._logits_at(tokens_S, ends)
            for p in open_:
                written[p].append(draw(logits_PV[p, : self._tokenizer.vocab_size], noise[p]))
                ids_PS[p, lengths[p]] = written[p][-1]
                lengths[p] += 1
        return written

    def _logits_at(self, tokens_S: Ids, places: Ids) -> NDArray[np.float64]:
        """Returns the logits of these tokens of the pack, `[P, V]`, the same bits on every rank. Collective."""
        planned = replace(self._planned, batch=replace(self._planned.batch, tokens=tokens_S))
        group = parallel_state.get_context_parallel_group()
        own_TV = self._logits_step(planned, self._runner.model[0], self._runner.device)
        rows = np.asarray(planned.plans["full"].global_from_local)[group.rank()]
        found_PV = own_TV.new_zeros((len(places), own_TV.shape[1]), dtype=torch.float32)
        for p, place in enumerate(places):
            held = np.flatnonzero(rows == place)
            if len(held):
                found_PV[p] = own_TV[int(held[0])]
        dist.all_reduce(found_PV, group=group)  # one rank holds each row, so nothing is rounded
        dist.broadcast(found_PV, src=0)  # replicas may round differently, and must not part
        return np.asarray(found_PV.double().cpu().numpy())

    def _sample(self, iteration: int, prompt: Prompt, ids: list[int]) -> TextSample:
        eod = self._tokenizer.eod
        given, text = prompt.ids.tolist(), self._tokenizer.detokenize
        return TextSample(
            iteration=iteration,
            split=self._split,
            document=prompt.document,
            prompt=text([i for i in given if i != eod]),
            continuation=text_behind(self._tokenizer, given, ids),
            original=text_behind(self._tokenizer, given, prompt.follows.tolist()),
            ended=eod in ids[-1:],
        )


def _empty_pack(num_texts: int, room: int, request: PlanRequest) -> PlannedBatch:
    """Returns a pack of texts without tokens, planned: needed keys travel once, tokens stay in order.

    A last document, of no use, fills the rows of all ranks: experts may refuse rows that hold no token.
    """
    used = num_texts * room
    rest = -used % (request.cp_size * request.config.token_multiple)
    lengths = (room,) * num_texts + (rest,) * (rest > 0)
    size = used + rest
    batch = PackedBatch(
        tokens=np.zeros(size, dtype=np.int64),
        labels=np.zeros(size, dtype=np.int64),
        loss_mask=np.zeros(size, dtype=np.float32),
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        mask=document_mask(lengths, within="causal"),
        document_lengths=lengths,
        document_kinds=("causal",) * len(lengths),
        document_starts=tuple(room * number for number in range(len(lengths))),
        document_names=("a sample of text",) * len(lengths),
    )
    # Published planners refuse lengths, and a search is not worth its time for so few tokens.
    simple = replace(request.config, planner="contiguous", chunk_size=None, num_stages=None)
    simple = replace(simple, head_degree=None, max_received_mb=None)
    return PlannedBatch(batch, make_batch_plans(batch.mask, replace(request, config=simple)))


def make_sampler(
    runner: Runner,
    data: RunData,
    request: PlanRequest,
    tokenizer: Tokenizer | None,
    logits_step: LogitsStep | None,
) -> tuple[TextSampler | None, dict[str, Any]]:
    """Returns the sampler that --log-text-samples asks for, and what run.json says of it.

    None where it asks for nothing, or where `refused` of the second says why it cannot be.
    """
    config = runner.config
    count = config.records.log_text_samples
    if not count:
        return None, {}
    split, documents = next(
        (name, part) for name in ("valid", "test", "train") if (part := data.splits[name])
    )
    limit = None if tokenizer is None else tokenizer.vocab_size
    refused = why_no_samples(config, documents, limit)
    if logits_step is None:
        refused = "the program that trains has no function for logits"
    said = {"wanted": count, "split": split, "refused": refused}
    if refused is not None or tokenizer is None or logits_step is None:
        return None, said
    prompts = choose_prompts(documents, count, config.data.seq_length)
    return TextSampler(runner, request, prompts, split, tokenizer, logits_step), said
