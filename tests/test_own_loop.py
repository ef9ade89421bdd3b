"""docs/own-loop.md: its program trains as it stands; calls of other libraries are mapped to what they compute."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import megatron_cp as mcp
from tests.programs import run_by_hand

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "own-loop.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def losses_of_the_models_own_attention():
    """Returns the losses of the page's model and packs in one process, each document in a batch of its own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        attn_implementation="eager", vocab_size=128, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(1, 6):
        documents = [torch.arange(n) * step % 128 for n in (37, 150, 64 + step)]
        total = sum(
            cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
            for ids in documents
        )
        loss = total / sum(len(ids) - 1 for ids in documents)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_program_has_the_losses_of_the_models_own_attention(tmp_path):
    """Within 1e-5 of losses near 5: fp32 rounds both, and the program prints six digits."""
    own_losses = losses_of_the_models_own_attention()
    program = tmp_path / "own_loop.py"
    program.write_text(PROGRAM)
    run = run_by_hand(program, tmp_path, 2)
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"^loss (.+)$", run.stdout, flags=re.MULTILINE)]
    np.testing.assert_allclose(losses, own_losses, rtol=0, atol=1e-5)


NUM_TOKENS = 30
LENGTHS = [7, 18, 5]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_its_attention_is_that_of_models_with_windows_caps_and_sinks(family):
    """On one rank, beside the model's own function under a dense mask, gradients too; Gemma 2's softmax is in fp32."""
    pytest.importorskip("transformers")
    own = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = {}
    exec(PROGRAM[: PROGRAM.index("def make_model")], names)
    (make_plans,) = re.findall(r"`plans = (mcp\.make_plans\(.*?)`", PAGE)
    full = mcp.mask.documents(LENGTHS, within="causal")
    config = mcp.CPConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    known = {"mcp": mcp, "full": full, "tokens": range(NUM_TOKENS), "size": 1, "config": config}
    plans = eval(make_plans, {**known, "n": 5})
    q, k, v = (torch.randn(1, n, NUM_TOKENS, 8, dtype=torch.float64) for n in (4, 2, 2))
    sink = torch.randn(4, dtype=torch.float64)
    asked = {"scaling": 0.3, **({"softcap": 0.5} if family == "gemma2" else {"s_aux": sink})}
    inputs = [x.requires_grad_() for x in (q, k, v, sink)][: 3 + (family == "gpt_oss")]
    layer = SimpleNamespace(num_key_value_groups=2, sinks=sink, training=True)
    for window in (None, 5):
        # Keys above the query's place less the window: as transformers' masks have it.
        pairs = dense(lambda q, k, n=window or NUM_TOKENS: (q - n < k) & (k <= q))
        hidden = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=q.dtype)
        hidden = hidden.masked_fill(~torch.from_numpy(pairs), -torch.inf)[None, None]
        expected, _ = own.eager_attention_forward(layer, q, k, v, hidden, **asked)
        out, _ = names["attention"](
            layer, q, k, v, None, sliding_window=window, cp=(plans, None), **asked
        )
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
        weights = torch.randn_like(out)
        for ours, theirs in zip(
            torch.autograd.grad((out * weights).sum(), inputs),
            torch.autograd.grad((expected * weights).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def dense(allowed):
    """Returns the pairs of a pack that `allowed(q, k)` has, beside those of its documents."""
    q, k = np.indices((NUM_TOKENS, NUM_TOKENS))
    document = np.repeat(np.arange(3), LENGTHS)
    return allowed(q, k) & (document[:, None] == document)


def attention_of(x, pairs):
    scores = torch.einsum("qnh,knh->nqk", x, x) / x.shape[-1] ** 0.5
    scores = scores.masked_fill(~torch.from_numpy(pairs), -torch.inf)
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1), x)


def test_what_calls_of_other_libraries_are_mapped_to():
    """Every expression of the table that is a call, on one rank, beside a dense mask or torch."""
    causal = dense(lambda q, k: k <= q)
    window = dense(lambda q, k: (q - 4 <= k) & (k <= q))
    x = torch.randn(NUM_TOKENS, 2, 8, dtype=torch.float64)
    config = mcp.CPConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    mask = mcp.mask.from_dense(causal)
    plan = mcp.make_plan(mask, 1, config)
    ranges = [(0, 7), (7, 25), (25, 30)]
    known = {
        "mcp": mcp, "x": x, "q": x, "k": x, "v": x, "plan": plan, "mask": mask, "config": config,
        "group": None, "size": 1, "rank": 0, "shift": 3, "dim": 0, "ulysses_degree": 1, "left": 4, "right": 0,
        "lengths": LENGTHS, "cu_seqlens": torch.tensor([0, 7, 25, 30], dtype=torch.int32),
        "q_ranges": ranges, "k_ranges": ranges, "types": ["causal"] * 3,
    }  # fmt: skip
    table = PAGE[PAGE.index("## Coming from") :]
    found = {call: eval(call, known) for call in re.findall(r"`(mcp\.[\w.]+\(.*?\))`", table)}
    masks = {call: one for call, one in found.items() if isinstance(one, mcp.AttentionMask)}
    plans = {call: one for call, one in found.items() if isinstance(one, mcp.AttentionPlan)}
    assert len(masks) == 2 and len(plans) == 3
    for call, one in [*masks.items(), *((call, plan.mask) for call, plan in plans.items())]:
        np.testing.assert_array_equal(one.to_dense(), window if "window" in call else causal, call)
    expected = {
        "mcp.dispatch(x, plan, group)": x,
        "mcp.undispatch(x, plan, group)": x,
        "mcp.roll(x, plan, group, shift, dim)": x.roll(3, 0),
        "mcp.position_ids(plan, rank)": torch.arange(NUM_TOKENS),
        "mcp.cp_attention(q, k, v, plan, group)": attention_of(x, causal),
        "mcp.attend(q, k, v, mask)": attention_of(x, causal),
    }
    for call, values in expected.items():
        result = found[call][0] if isinstance(found[call], tuple) else found[call]
        torch.testing.assert_close(result, values, rtol=0, atol=1e-12)
    configs = [one for one in found.values() if isinstance(one, mcp.CPConfig)]
    assert len(found) == len(masks) + len(plans) + len(expected) + len(configs)
    planners = set(re.findall(r'planner="(\w+)"', table))
    assert {"zigzag", "usp", "per_document_zigzag"} < planners <= mcp.plan.PLANNERS.keys()
