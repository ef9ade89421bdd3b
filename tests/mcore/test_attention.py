"""The core attention module by itself, against dense float64 attention; and what it refuses."""

import warnings

import numpy as np
import pytest
import torch

from tests.attn.formula import stored_lse_attention
from tests.closeness import assert_within_budget
from tests.mcore.tiny_gpt import Case, make_config, parallel_state
from tests.oracles.attention import exact_attention, plain_attention
from tests.ranks import run_on_ranks

NUM_HEADS, NUM_GROUPS, HEAD_DIM = 4, 2, 16


def make_attention(case: Case, **arguments):
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_cp.mcore.mixing.attention import ContextParallelAttention

    settings = {
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        **arguments,
    }
    return ContextParallelAttention(make_config(case), **settings)


def zigzag_rows(lengths: list[int], cp: int, rank: int) -> np.ndarray:
    """Rows of this rank when Megatron splits every document by itself."""
    rows, start = [], 0
    for length in lengths:
        pieces = np.arange(start, start + length).reshape(2 * cp, -1)
        rows += [pieces[rank], pieces[2 * cp - 1 - rank]]
        start += length
    return np.concatenate(rows)


def random_heads(num_rows: int, batch: int = 1, value_dim: int = HEAD_DIM) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(NUM_HEADS, HEAD_DIM), (NUM_GROUPS, HEAD_DIM), (NUM_GROUPS, value_dim)]
    return [torch.randn(num_rows, batch, *shape, generator=generator) for shape in shapes]


def attend_packed(rank, cp, real, padded, mask_type, three_dimensional):
    """(rows, out, dq, dk, dv) of this rank for Megatron's THD parameters."""
    with parallel_state(Case(cp=cp)):
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.transformer.enums import AttnMaskType

        attention = make_attention(
            Case(cp=cp), attn_mask_type=AttnMaskType[mask_type], thd_split="per_document"
        )
        cu_real, cu_padded = (
            torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32) for lengths in (real, padded)
        )
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_real,
            cu_seqlens_kv=cu_real,
            cu_seqlens_q_padded=cu_padded,
            cu_seqlens_kv_padded=cu_padded.clone(),
        )
        rows = zigzag_rows(padded, cp, rank)
        q, k, v = (x[rows] for x in random_heads(sum(padded)))
        if three_dimensional:
            q, k, v = q[:, 0], k[:, 0], v[:, 0]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, None, packed_seq_params=params)
        assert out.shape == (len(rows), NUM_HEADS * HEAD_DIM)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        return rows, out.detach(), *(x.reshape(len(rows), -1, HEAD_DIM) for x in gradients)


def dense_documents(real: list[int], padded: list[int], causal: bool) -> np.ndarray:
    allowed = np.zeros((sum(padded),) * 2, bool)
    start = 0
    for length, room in zip(real, padded, strict=True):
        block = np.ones((length, length), bool)
        allowed[start : start + length, start : start + length] = (
            np.tril(block) if causal else block
        )
        start += room
    return allowed


@pytest.mark.parametrize("three_dimensional", [False, True])
@pytest.mark.parametrize(
    ("real", "padded", "mask_type"),
    [
        ([8, 16], [8, 16], "causal"),
        ([0, 8, 0, 24, 0], [0, 8, 0, 24, 0], "padding_causal"),
        ([5, 13], [8, 16], "padding_causal"),
        ([7, 1], [8, 8], "padding"),
        ([16, 8], [16, 8], "no_mask"),
    ],
)
@pytest.mark.parametrize("cp", [1, 2])
def test_packed_documents_in_megatrons_own_split_equal_dense_attention(
    cp, real, padded, mask_type, three_dimensional
):
    parts = run_on_ranks(cp, _attend_packed, real, padded, mask_type, three_dimensional)
    rows = np.concatenate([part[0] for part in parts])
    ours = [torch.cat([part[i] for part in parts])[np.argsort(rows)] for i in range(1, 5)]
    q, k, v = (x[:, 0] for x in random_heads(sum(padded)))
    allowed = torch.from_numpy(
        dense_documents(real, padded, mask_type in ("causal", "padding_causal"))
    )
    out = exact_attention(q, k, v, allowed).out
    dout = 2 * out.float()  # of the squared sum
    plain, exact = (f(q, k, v, allowed, dout=dout) for f in (plain_attention, exact_attention))
    doubles = (x.double() for x in (q, k, v))
    _, sizes = stored_lse_attention(*doubles, allowed, dout=dout.double(), dlse=torch.zeros(1))
    for name, index in (("out", 0), ("dq", 1), ("dk", 2), ("dv", 3)):
        attribute = getattr(plain, name), getattr(exact, name)
        actual = ours[index].reshape(attribute[0].shape)
        # dout is rounded once more on our side: its own output, squared.
        assert_within_budget(actual, *attribute, name, size=2 * sizes[name])


def _attend_packed(rank, world_size, *arguments):
    return attend_packed(rank, world_size, *arguments)


def _sinks_and_next_draw(rank, world_size):
    case = Case(tp=world_size).with_options(softmax_type="learnable")
    with parallel_state(case):
        torch.manual_seed(7)
        sinks = make_attention(case).softmax_offset
        return sinks.detach().clone(), torch.rand(1)


def test_sinks_and_later_draws_start_the_same_on_any_tensor_parallel_ranks():
    ((alone, next_draw),) = run_on_ranks(1, _sinks_and_next_draw)
    parts = run_on_ranks(2, _sinks_and_next_draw)
    assert alone.unique().numel() == alone.numel() == 4
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), alone, rtol=0, atol=0)
    assert [part[1] for part in parts] == [next_draw] * 2


def _attend_batch(rank, cp, softmax_type):
    with parallel_state(Case(cp=cp)):
        attention = make_attention(Case(cp=cp).with_options(softmax_type=softmax_type))
        rows = zigzag_rows([32], cp, rank)
        q, k, v = (x[rows] for x in random_heads(32, batch=3, value_dim=8))
        return rows, attention(q, k, v, None)


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
def test_every_sequence_of_a_batch_is_attended_by_itself(softmax_type: str):
    parts = run_on_ranks(2, _attend_batch, softmax_type)
    rows = np.concatenate([rows for rows, _ in parts])
    ours = torch.cat([out for _, out in parts])[np.argsort(rows)]
    sink = torch.zeros(NUM_HEADS) if softmax_type == "off-by-one" else None
    for index in range(3):
        q, k, v = (x[:, index] for x in random_heads(32, batch=3, value_dim=8))
        allowed = torch.ones(32, 32, dtype=torch.bool).tril()
        plain, exact = (f(q, k, v, allowed, sink=sink) for f in (plain_attention, exact_attention))
        assert_within_budget(ours[:, index].view(32, NUM_HEADS, 8), plain.out, exact.out, "out")


def _refusals(rank, world_size):
    """The message of each refusal by name, or the outcome where there was none."""
    messages = {}

    def note(name, call):
        try:
            messages[name] = f"no error: {type(call())}"
        except (ValueError, NotImplementedError) as error:
            messages[name] = f"{type(error).__name__}: {error}"

    with parallel_state(Case()):
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.transformer.enums import AttnMaskType

        from megatron_cp.mask import builders
        from megatron_cp.mcore.batch import context_parallel_params
        from megatron_cp.plan.planner import make_plan

        case = Case()
        note("dropout", lambda: make_attention(case.with_options(attention_dropout=1.5)))
        note("dropout argument", lambda: make_attention(case, attention_dropout=-0.1))
        note("thd split", lambda: make_attention(case, thd_split="per_sequence"))
        note("cross", lambda: make_attention(case, attention_type="cross"))
        attention = make_attention(case)
        q, k, v = random_heads(16)
        causal = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
        note("causal mask", lambda: attention(q, k, v, causal))
        two_documents = causal.clone()
        two_documents[..., 8:, :8] = True
        note("document mask", lambda: attention(q, k, v, two_documents))
        changed = causal.clone()
        attention(q, k, v, changed)
        changed[..., 8:, :8] = True
        note("mask changed after it was accepted", lambda: attention(q, k, v, changed))
        note(
            "mask of a full layer",
            lambda: attention(q, k, v, causal, attn_mask_type=AttnMaskType.no_mask),
        )
        is_padding = torch.arange(16) >= 12
        note("mask of padding", lambda: attention(q, k, v, causal | is_padding))
        note("arbitrary", lambda: attention(q, k, v, None, attn_mask_type=AttnMaskType.arbitrary))
        note("bias", lambda: attention(q, k, v, None, attention_bias=torch.zeros(1)))
        note("variant", lambda: attention(q, k, v, None, x=torch.zeros(1)))
        note("cache", lambda: attention(q[:1], k, v, None))
        note(
            "bshd",
            lambda: attention(q, k, v, None, packed_seq_params=PackedSeqParams(qkv_format="bshd")),
        )
        plans = {"full": make_plan(builders.causal(16), 1)}
        params = context_parallel_params(plans, 0, "cpu")
        note(
            "mask beside a plan",
            lambda: attention(q, k, v, causal, packed_seq_params=params),
        )
        note(
            "rows of another plan",
            lambda: attention(q[:8], k[:8], v[:8], None, packed_seq_params=params),
        )
        windowed = make_attention(case.with_options(window_size=(4, 0)))
        note("no window plan", lambda: windowed(q, k, v, None, packed_seq_params=params))
    return messages


def test_what_cannot_be_honoured_is_refused_with_a_way_out():
    (messages,) = run_on_ranks(1, _refusals)
    assert messages.pop("causal mask").startswith("no error")
    expected = {
        "dropout": "attention_dropout=1.5",
        "dropout argument": "attention_dropout=-0.1",
        "thd split": "thd_split='per_sequence'",
        "cross": "attention_type='cross'",
        "document mask": "is not the causal mask",
        "mask changed after it was accepted": "is not the causal mask",
        "mask of a full layer": "is not the causal mask",
        "mask of padding": "Megatron-SWIFT: padding_free, ROLL: use_sequence_packing",
        "arbitrary": "AttnMaskType.arbitrary",
        "bias": "attention_bias",
        "variant": "core attention was given x",
        "cache": "key-value cache",
        "bshd": "qkv_format='bshd'",
        "mask beside a plan": "the plan is the mask",
        "rows of another plan": "the plan is for 16 rows",
        "no window plan": "has no 'window' plan",
    }
    assert set(messages) == set(expected)
    for name, part in expected.items():
        assert part in messages[name], f"{name}: {messages[name]}"


def _split_is_refused(rank, world_size):
    with parallel_state(Case(cp=2)):
        from megatron.core.packed_seq_params import PackedSeqParams

        attention = make_attention(Case(cp=2), thd_split="per_document")
        cu_seqlens = torch.tensor([0, 6, 16], dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens
        )
        attention(*random_heads(8), None, packed_seq_params=params)


def test_a_document_that_cannot_have_been_split_zigzag_is_refused_on_every_rank():
    errors = run_on_ranks(2, _split_is_refused, return_exceptions=True)
    for error in errors:
        assert isinstance(error, ValueError) and "document 0 has 6 tokens" in str(error)


def attend_rows(rank, cp, rows_of_rank):
    """The warnings of two calls on rows of one sequence, `rows_of_rank[rank]`."""
    with parallel_state(Case(cp=cp)), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        attention = make_attention(Case(cp=cp))
        heads = [x[rows_of_rank[rank]] for x in random_heads(16)]
        for _ in range(2):
            attention(*heads, None)
        return [str(one.message) for one in told if "context ranks" in str(one.message)]


@pytest.mark.parametrize("cp", [2, 3])
def test_a_batch_that_nobody_has_cut_is_told_once_on_every_rank(cp):
    whole = [np.arange(12)] * cp
    for told in run_on_ranks(cp, attend_rows, whole):
        (line,) = told
        assert f"all {cp} context ranks hold the same 12 rows" in line
        assert "get_batch_on_this_cp_rank" in line
    cut = [zigzag_rows([12], cp, rank) for rank in range(cp)]
    assert run_on_ranks(cp, attend_rows, cut) == [[]] * cp
