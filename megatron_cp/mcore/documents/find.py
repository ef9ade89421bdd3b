"""Finds the documents of a micro-batch that Megatron-LM has loaded.

Megatron-LM says in three ways that tokens see their own document only, and each leaves other traces:

    asked for by                                          source        known from
    --sft, --dataloader-inter-document-masking            cu_seqlens    the loader's cumulative lengths
    --reset-attention-mask, and --reset-position-ids      positions     position ids that start again at 0
                            and a mask in the loader      mask          the dense mask, b x S x S
                            and neither of them           eod           the tokens that end documents

The flags are read once and make a `DocumentRule`, which is data. Samples of a micro-batch follow one another
in a single stream of b x S tokens, so a document is a length, and the samples' ends are ends of documents.
"""

# b samples of a micro-batch, S tokens of a sample

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_cp.mcore.settings.validation import balances_samples
from megatron_cp.mcore.versions import program

Source = Literal["none", "cu_seqlens", "positions", "mask", "eod", "batch"]

_WORDS = {
    "cu_seqlens": "cu_seqlens",
    "positions": "position ids",
    "mask": "the dense attention mask",
    "eod": "end-of-document tokens",
    "batch": "what the batch holds: cu_seqlens or a dense mask",
}


@dataclass(frozen=True)
class DocumentRule:
    """Says where the documents of a micro-batch are known from."""

    source: Source = "batch"
    """One of the sources above; "none" where no flag asks for documents; "batch" where no flags are known:
    then `cu_seqlens` or a dense mask, if the batch has one."""
    asked_by: str = ""
    """The flags that ask for documents, for messages."""
    eod: int | None = None
    """The token that ends a document, for source "eod"."""

    @property
    def asks_for_documents(self) -> bool:
        """Whether flags say that documents must not see each other."""
        return self.source not in ("none", "batch")

    def describe(self, lengths: tuple[int, ...]) -> str:
        """Returns what was found in a micro-batch, for the log."""
        return f"documents: from {_WORDS[self.source]}, {len(lengths)} in the first pack"


def rule_from_arguments(args: Namespace, tokenizer: Any = None) -> DocumentRule:
    """Returns the rule that Megatron-LM's parsed arguments mean.

    `tokenizer` is asked for its end-of-document token where nothing else tells documents. Raises ValueError
    where documents are asked for and that token cannot be seen in a batch, NotImplementedError where stages of
    Megatron-LM would disagree about the shape of a batch.
    """
    for name in ("sft", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            _check_overlap(args)
            _check_stages_see_one_stream(args, name)
            _check_samples_are_not_balanced(args, name)
            return DocumentRule("cu_seqlens", f"--{name.replace('_', '-')}")
    if not getattr(args, "reset_attention_mask", False):
        return DocumentRule("none")
    _check_overlap(args)
    asked_by = "--reset-attention-mask"
    if getattr(args, "reset_position_ids", False):
        return DocumentRule("positions", f"{asked_by} --reset-position-ids")
    if getattr(args, "create_attention_mask_in_dataloader", True):
        return DocumentRule("mask", asked_by)
    return DocumentRule("eod", asked_by, _visible_eod(args, tokenizer))


def _check_stages_see_one_stream(args: Namespace, name: str) -> None:
    """Refuses samples that Megatron-LM joins to one stream, between stages that expect them side by side."""
    stages = getattr(args, "pipeline_model_parallel_size", None) or 1
    for flag in ("micro-batch-size", "eval-micro-batch-size"):
        size = getattr(args, flag.replace("-", "_"), None) or 1
        if size > 1 and stages > 1:
            raise NotImplementedError(
                f"--{name.replace('_', '-')} with --{flag} {size} and {stages} pipeline stages: Megatron-LM joins the "
                f"samples to one sequence, and later stages receive them side by side; give --{flag} 1 and the same "
                f"--{flag.replace('micro', 'global')}"
            )
    has_middle = stages > 2 or getattr(args, "virtual_pipeline_model_parallel_size", None)
    if name == "dataloader_inter_document_masking" and has_middle:
        raise NotImplementedError(
            f"--dataloader-inter-document-masking with {stages} pipeline stages: Megatron-LM loads no batch for the "
            "stages between the first and the last, which need its lengths; where every document ends with its end "
            "token, --reset-attention-mask --reset-position-ids hides the same documents on any number of stages"
        )


def _check_samples_are_not_balanced(args: Namespace, name: str) -> None:
    """Refuses experts that are balanced sample by sample where Megatron-LM joins the samples to one sequence.

    Its layers part them again, which they cannot where a plan has dealt the rows: the loss would be one of all samples.
    """
    size = getattr(args, "micro_batch_size", None) or 1
    if size > 1 and balances_samples(args):
        kinds = args.moe_router_load_balancing_type
        raise NotImplementedError(
            f"--{name.replace('_', '-')} with --micro-batch-size {size} and --moe-router-load-balancing-type {kinds}, "
            "which balances each sample: the samples are one sequence here; give --micro-batch-size 1 and the same "
            "--global-batch-size"
        )


def _check_overlap(args: Namespace) -> None:
    """Refuses a schedule of Megatron-LM that calls the model without packed_seq_params."""
    if getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise NotImplementedError(
            "--overlap-moe-expert-parallel-comm with documents: Megatron-LM's schedule for it gives the layers no "
            "plan; leave it out: results stay the same"
        )


def _visible_eod(args: Namespace, tokenizer: Any) -> int:
    """Returns the token that ends documents in the batches of Megatron-LM's loader."""
    eod, pad = _token(tokenizer, "eod"), _token(tokenizer, "pad")
    if eod is None:
        raise ValueError(
            "--reset-attention-mask with --no-create-attention-mask-in-dataloader, and the tokenizer names no "
            "end-of-document token: documents cannot be known; let the loader make the mask (leave "
            "--no-create-attention-mask-in-dataloader out)"
        )
    if pad == eod and getattr(args, "allow_ambiguous_pad_tokens", False):
        raise ValueError(
            f"the tokenizer has one token, {eod}, for padding and for the end of a document, and with "
            "--allow-ambiguous-pad-tokens Megatron-LM's loader overwrites it: documents cannot be known; let the "
            "loader make the mask (leave --no-create-attention-mask-in-dataloader out)"
        )
    return int(eod)


def _token(tokenizer: Any, name: str) -> int | None:
    try:
        token: int | None = getattr(tokenizer, name)
    except (AttributeError, NotImplementedError):  # Megatron's tokenizers raise for what they lack
        return None
    return token


def find_documents(batch: Mapping[str, Any], rule: DocumentRule) -> tuple[int, ...] | None:
    """Returns the lengths of the documents of a whole micro-batch, in order; None where there are none.

    `batch` has Megatron-LM's keys: `position_ids`, `tokens` `[b, S]`, `attention_mask` `[b, 1, S, S]` (True =
    hidden), `cu_seqlens` and `cu_seqlens_padded` `[1, n]`. It is not yet cut over the context ranks. Raises
    ValueError where what the rule names is missing, or does not describe documents.
    """
    if rule.source == "none":
        return None
    if rule.source == "cu_seqlens" or (
        rule.source == "batch" and batch.get("cu_seqlens") is not None
    ):
        return _from_cu_seqlens(batch, rule)
    if rule.source == "batch":
        mask = batch.get("attention_mask")
        if mask is None or mask.dim() != 4:  # one of another shape is judged by attention
            return None
        lengths = lengths_from_dense_mask(mask)
        return lengths if len(lengths) > mask.shape[0] else None
    return lengths_of_starts(find_starts(batch, rule))


def find_starts(batch: Mapping[str, Any], rule: DocumentRule) -> Tensor:
    """Returns bool `[b, S]`, the first tokens of documents, where the rule names positions, a mask or a token.

    Raises ValueError where the batch lacks what the rule names, NotImplementedError where its dense mask is not that of
    these documents.
    """
    names = {"positions": "position_ids", "mask": "attention_mask", "eod": "tokens"}
    values = batch.get(names[rule.source])
    if values is None:
        raise ValueError(
            f"{rule.asked_by} asks for documents, but the batch has no {names[rule.source]}; this stage cannot "
            "know them: train through Megatron-LM's get_batch_on_this_tp_rank and get_batch_on_this_cp_rank"
        )
    if rule.source == "mask":
        return starts_from_dense_mask(values)
    by_positions = rule.source == "positions"
    starts = starts_from_positions(values) if by_positions else starts_from_eod(values, rule.eod)
    _check_dense_mask(batch.get("attention_mask"), starts)
    return starts


def _check_dense_mask(attention_mask: Tensor | None, starts: Tensor) -> None:
    """Raises NotImplementedError for a dense mask of anything but these documents: it would be left out.

    The keys of each row are counted in every batch, which reads it once; only another number is looked at.
    """
    if attention_mask is None:
        return
    index = torch.arange(starts.shape[1], device=starts.device)
    begins = torch.where(starts, index, 0).cummax(dim=-1).values
    seen = attention_mask.shape[-1] - attention_mask.count_nonzero(dim=-1)
    if torch.equal(seen, (index - begins + 1)[:, None]):
        return
    found = starts_from_dense_mask(attention_mask)
    raise NotImplementedError(
        f"the batch's dense attention_mask has {int(found.sum())} documents, its positions or tokens tell "
        f"{int(starts.sum())}; a mask is never left out: make both from the same documents"
    )


def starts_from_positions(position_ids: Tensor) -> Tensor:
    """Returns bool `[b, S]`: the tokens whose position does not follow the one before.

    Raises ValueError where such a position is not 0.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if bool((starts & (position_ids != 0)).any()):
        row, place = (starts & (position_ids != 0)).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {place}]={int(position_ids[row, place])} neither follows the position before nor "
            "is 0; positions of packed documents count from 0 in each; check the data set that makes them"
        )
    return starts


def starts_from_eod(tokens: Tensor, eod: int | None) -> Tensor:
    """Returns bool `[b, S]`: the first token of each sample, and those behind an end-of-document token."""
    starts = torch.ones_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == eod
    return starts


def lengths_from_dense_mask(attention_mask: Tensor) -> tuple[int, ...]:
    """Returns the lengths of the documents in a dense mask, bool `[b, 1, S, S]` (True = hidden)."""
    return lengths_of_starts(starts_from_dense_mask(attention_mask))


def starts_from_dense_mask(attention_mask: Tensor) -> Tensor:
    """Returns bool `[b, S]`: the tokens that see none before them.

    Raises NotImplementedError if the mask is anything but causal documents one after the other.
    """
    visible = ~attention_mask[:, 0].bool()
    num_tokens = visible.shape[-1]
    index = torch.arange(num_tokens, device=visible.device)
    first = visible.int().argmax(dim=-1)  # the first key that each query sees: its document's start
    starts = first == index[: visible.shape[-2]]
    is_square = visible.shape[-2] == num_tokens
    if is_square:
        start = (starts * index).cummax(dim=-1).values[..., None]
    if not is_square or not bool((visible == (index <= index[:, None]) & (index >= start)).all()):
        raise NotImplementedError(
            f"attention_mask of shape {tuple(attention_mask.shape)} is not that of causal documents one after the "
            "other; a dense mask of another kind is not served, and never ignored; give the mask as a plan "
            "(megatron_cp.mcore.context_parallel_params) in packed_seq_params"
        )
    return starts


def _from_cu_seqlens(batch: Mapping[str, Any], rule: DocumentRule) -> tuple[int, ...]:
    real, padded = batch.get("cu_seqlens"), batch.get("cu_seqlens_padded")
    if real is None:
        raise ValueError(
            f"{rule.asked_by} asks for documents, but the batch has no cu_seqlens; check that the data set gives "
            "them, with --micro-batch-size 1 before Megatron-Core 0.19"
        )
    # The padding of a document stands at its end, where no token of it looks: Megatron counts it in, on
    # every pipeline stage, and so must we.
    ends = (real if padded is None else padded).flatten().tolist()
    sample = next(
        (batch[k] for k in ("tokens", "labels", "position_ids") if batch.get(k) is not None), None
    )
    lengths = lengths_from_ends(ends, None if sample is None else sample.numel())
    positions = batch.get("position_ids")
    if positions is not None and positions.numel() == sum(lengths):
        _check_positions(positions.flatten(), ends)
    return lengths


def lengths_from_ends(cu_seqlens: list[int], num_tokens: int | None) -> tuple[int, ...]:
    """Returns the lengths between cumulative ends, without empty ones; the rest of the stream is one more.

    Raises ValueError for ends that fall, do not begin at 0, or lie beyond the stream.
    """
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    if cu_seqlens[:1] != [0] or min(lengths, default=-1) < 0:
        raise ValueError(
            f"cu_seqlens={cu_seqlens[:8]} must begin at 0 and never fall; give the cumulative lengths of the documents"
        )
    rest = 0 if num_tokens is None else num_tokens - cu_seqlens[-1]
    if rest < 0:
        raise ValueError(
            f"cu_seqlens ends at {cu_seqlens[-1]}, but the batch has {num_tokens} tokens; give the cumulative "
            "lengths of the documents in this batch"
        )
    return tuple(length for length in (*lengths, rest) if length)


def _check_positions(positions: Tensor, ends: list[int]) -> None:
    """Refuses positions `[b x S]` that start again elsewhere than the documents do."""
    restarts = (positions[1:] != positions[:-1] + 1).nonzero().flatten() + 1
    if not len(restarts):
        return  # they count through the pack
    begins = {end for end in ends if 0 < end < len(positions)}
    for place in restarts.tolist():
        if place not in begins:
            raise ValueError(
                f"cu_seqlens and position_ids disagree: positions start again at token {place}, where no document "
                "begins; make both from the same lengths"
            )
    for place in sorted(begins - {ends[-1]}):  # behind the last document is padding
        if int(positions[place]) != 0:
            raise ValueError(
                f"cu_seqlens and position_ids disagree: a document begins at token {place}, whose position is "
                f"{int(positions[place])}; make both from the same lengths"
            )


def lengths_of_starts(starts: Tensor) -> tuple[int, ...]:
    """Returns the distances between the set places of bool `[b, S]`, read as one stream."""
    stream = starts.flatten()
    places = stream.nonzero().flatten().tolist()
    return tuple(b - a for a, b in zip(places, [*places[1:], stream.numel()], strict=True))


_known: tuple[Any, DocumentRule] = (None, DocumentRule())


def current_rule() -> DocumentRule:
    """Returns the rule of the Megatron-LM program that this process runs; source "batch" outside of one."""
    global _known
    args = program.arguments()
    if args is None:
        return DocumentRule()
    if args is not _known[0]:
        _known = (args, rule_from_arguments(args, program.tokenizer()))
    return _known[1]
