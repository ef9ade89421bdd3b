"""Documents found in a batch, against lists made one token at a time as Megatron-LM describes its flags."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.mcore.documents.find import DocumentRule, find_documents, rule_from_arguments

EOD = 9
samples = st.lists(st.integers(0, EOD), min_size=1, max_size=40)


def loaded(sample: list[int]) -> tuple[list[int], list[int], list[list[bool]]]:
    """(lengths, positions, hidden) of a sample: a document ends with EOD, and sees itself only, causally."""
    document, position, number, place = [], [], 0, 0
    for token in sample:
        document.append(number)
        position.append(place)
        place += 1
        if token == EOD:
            number, place = number + 1, 0
    lengths = [document.count(d) for d in sorted(set(document))]
    size = range(len(sample))
    hidden = [[k > q or document[q] != document[k] for k in size] for q in size]
    return lengths, position, hidden


def batch_of(samples: list[list[int]]) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
    made = [loaded(sample) for sample in samples]
    batch = {
        "tokens": torch.tensor(samples),
        "position_ids": torch.tensor([positions for _, positions, _ in made]),
        "attention_mask": torch.tensor([hidden for _, _, hidden in made])[:, None],
    }
    return batch, tuple(length for lengths, _, _ in made for length in lengths)


@given(samples, st.integers(1, 3), st.data())
def test_a_dense_mask_beside_positions_or_tokens_is_never_left_out(sample, num_samples, data):
    """Where it says anything else, by one pair that is seen or hidden, the batch is refused."""
    batch, lengths = batch_of([sample[i:] + sample[:i] for i in range(num_samples)])
    size = len(sample)
    place = [data.draw(st.integers(0, end - 1)) for end in (num_samples, 1, size, size)]
    changed = batch["attention_mask"].clone()
    changed[tuple(place)] ^= True
    for source in ("positions", "eod"):
        rule = DocumentRule(source, "--flags", EOD)
        assert find_documents(batch, rule) == lengths
        with pytest.raises(NotImplementedError, match="attention_mask"):
            find_documents({**batch, "attention_mask": changed}, rule)


@given(samples, st.integers(1, 3))
def test_every_source_finds_the_documents_of_every_sample(sample, num_samples):
    batch, lengths = batch_of([sample[i:] + sample[:i] for i in range(num_samples)])
    for source in ("positions", "mask", "eod"):
        assert find_documents(batch, DocumentRule(source, "--flags", EOD)) == lengths
    assert find_documents(batch, DocumentRule("none")) is None
    found = find_documents({"attention_mask": batch["attention_mask"]}, DocumentRule())
    assert found == (lengths if len(lengths) > num_samples else None)
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    thd = {
        "cu_seqlens": torch.tensor([[*ends, ends[-1]]], dtype=torch.int32)
    }  # empty ones count for nothing
    assert find_documents(thd, DocumentRule()) == lengths
    thd["position_ids"] = batch["position_ids"].view(1, -1)
    assert find_documents(thd, DocumentRule("cu_seqlens", "--sft")) == lengths


def test_padding_belongs_to_its_document_and_the_rest_of_the_pack_is_one_more():
    batch = {
        "tokens": torch.zeros(1, 16, dtype=torch.int64),
        "cu_seqlens": torch.tensor([[0, 3, 8]]),
        "cu_seqlens_padded": torch.tensor([[0, 4, 12]]),
    }
    assert find_documents(batch, DocumentRule()) == (4, 8, 4)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "none"),
        ({"reset_position_ids": True}, "none"),  # positions alone hide nobody
        ({"eod_mask_loss": True}, "none"),
        ({"reset_attention_mask": True}, "mask"),
        ({"reset_attention_mask": True, "reset_position_ids": True}, "positions"),
        ({"reset_attention_mask": True, "create_attention_mask_in_dataloader": False}, "eod"),
        ({"dataloader_inter_document_masking": True, "reset_attention_mask": True}, "cu_seqlens"),
        ({"sft": True}, "cu_seqlens"),
    ],
)
def test_flags_say_where_documents_are_known_from(flags, expected):
    rule = rule_from_arguments(Namespace(**flags), SimpleNamespace(eod=EOD, pad=0))
    assert rule.source == expected
    assert rule.asks_for_documents == (expected != "none")
    assert rule.eod == (EOD if expected == "eod" else None)


class _NoSuchToken:
    eod = EOD

    @property
    def pad(self):
        raise NotImplementedError("no pad")


def test_a_tokenizer_whose_documents_ends_cannot_be_seen_is_refused():
    flags = {"reset_attention_mask": True, "create_attention_mask_in_dataloader": False}
    assert rule_from_arguments(Namespace(**flags), _NoSuchToken()).eod == EOD
    same = SimpleNamespace(eod=EOD, pad=EOD)
    # Megatron's loader then keeps every pad token, unless it was told not to.
    assert rule_from_arguments(Namespace(**flags), same).eod == EOD
    with pytest.raises(ValueError, match="one token, 9, for padding and for the end"):
        rule_from_arguments(Namespace(**flags, allow_ambiguous_pad_tokens=True), same)
    with pytest.raises(ValueError, match="names no end-of-document token"):
        rule_from_arguments(Namespace(**flags), None)


def _dense(*allowed: str) -> torch.Tensor:
    return torch.tensor([[[[c == "." for c in row] for row in allowed]]])


@pytest.mark.parametrize(
    ("rule", "batch", "message"),
    [
        ("positions", {"position_ids": torch.tensor([[0, 1, 3, 4]])}, r"position_ids\[0, 2\]=3"),
        ("positions", {"position_ids": torch.tensor([[0, 1], [2, 3]])}, r"position_ids\[1, 0\]=2"),
        ("positions", {}, "the batch has no position_ids"),
        ("eod", {}, "the batch has no tokens"),
        ("cu_seqlens", {}, "the batch has no cu_seqlens"),
        ("batch", {"cu_seqlens": torch.tensor([1, 4])}, "must begin at 0"),
        ("batch", {"cu_seqlens": torch.tensor([0, 4, 3])}, "must begin at 0 and never fall"),
        ("batch", {"cu_seqlens": torch.tensor([0, 9]), "tokens": torch.zeros(1, 8)}, "ends at 9"),
        (
            "batch",
            {"cu_seqlens": torch.tensor([0, 2, 4]), "position_ids": torch.tensor([[0, 1, 2, 0]])},
            "start again at token 3",
        ),
        (
            "batch",
            {"cu_seqlens": torch.tensor([0, 1, 2, 4]), "position_ids": torch.tensor([[0, 1, 0, 1]])},
            "begins at token 1, whose position is 1",
        ),
        ("mask", {"attention_mask": _dense("#..", "##.", "#.#")}, "is not that of causal documents"),
        ("batch", {"attention_mask": _dense("#..", "#.#", "###")}, "is not that of causal documents"),
        ("mask", {"attention_mask": _dense("#..", ".#.", ".##")[..., :2, :]}, "not that of causal"),
        ("mask", {"attention_mask": _dense("#..", ".#.", "###")}, "is not that of causal documents"),
        ("mask", {"attention_mask": _dense("#..", "...", "..#")}, "is not that of causal documents"),
    ],
)  # fmt: skip
def test_what_does_not_describe_documents_is_refused(rule, batch, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        find_documents(batch, DocumentRule(rule, "--flags", EOD))


@pytest.mark.parametrize("flag", ["micro_batch_size", "eval_micro_batch_size"])
def test_samples_joined_to_one_sequence_are_refused_between_pipeline_stages(flag):
    flags = {"dataloader_inter_document_masking": True, flag: 2}
    args = Namespace(**flags, pipeline_model_parallel_size=2)
    advice = f"give --{flag.replace('_', '-')} 1 and the same"
    with pytest.raises(NotImplementedError, match=advice):
        rule_from_arguments(args)
    args.pipeline_model_parallel_size = 1
    assert rule_from_arguments(args).source == "cu_seqlens"


@pytest.mark.parametrize("name", ["sft", "dataloader_inter_document_masking"])
@pytest.mark.parametrize("kinds", ["seq_aux_loss", ["aux_loss", "seq_aux_loss"]])
def test_samples_joined_to_one_sequence_are_refused_where_each_is_balanced(name: str, kinds):
    """Megatron-LM 0.20 on a CPU: seq_load_balancing_loss was 1.0014 with two samples joined, 1.0029 one by one."""
    flags = {name: True, "num_experts": 4, "moe_router_load_balancing_type": kinds}
    with pytest.raises(NotImplementedError, match="give --micro-batch-size 1 and the same"):
        rule_from_arguments(Namespace(**flags, micro_batch_size=2))
    for change in (
        {"micro_batch_size": 1, "eval_micro_batch_size": 2},  # evaluation balances nothing
        {"moe_router_load_balancing_type": "aux_loss"},
        {"num_experts": None},
    ):
        args = Namespace(**{"micro_batch_size": 2, **flags, **change})
        assert rule_from_arguments(args).source == "cu_seqlens"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pipeline_model_parallel_size": 3}, "loads no batch for the stages between"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "loads no batch for the stages between",
        ),
        ({"overlap_moe_expert_parallel_comm": True}, "gives the layers no plan"),
    ],
)
def test_programs_whose_layers_would_get_no_plan_are_refused(flags, message):
    asks = {"dataloader_inter_document_masking": True}
    with pytest.raises(NotImplementedError, match=message):
        rule_from_arguments(Namespace(**asks, **flags))
    assert rule_from_arguments(Namespace(**flags)).source == "none"


@pytest.mark.parametrize("other", [[1, 2, EOD, 4, 5, 6, 7, EOD], [1, EOD, 3, 4, 5, EOD, 7, EOD]])
def test_a_mask_of_other_documents_with_as_many_pairs_is_refused(other):
    """Of documents of 5 and 3, of 3 and 5, and of 2, 4 and 2 the masks have 21, 21 and 16 pairs."""
    batch, _ = batch_of([[1, 2, 3, 4, EOD, 6, 7, EOD]])
    batch["attention_mask"] = batch_of([other])[0]["attention_mask"]
    rule = DocumentRule("positions", "--reset-position-ids")
    with pytest.raises(NotImplementedError, match="a mask is never left out"):
        find_documents(batch, rule)


def test_a_mask_of_padding_says_nothing_of_documents():
    batch = {"tokens": torch.zeros(2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.bool)}
    assert find_documents(batch, DocumentRule()) is None
