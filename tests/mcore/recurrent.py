"""A recurrent layer on ranks: its rows under a plan, its outputs, and the gradients of rows and weights."""

import torch

from tests.mcore.tiny_gpt import Case, parallel_state
from tests.oracles.plans import tokens_of
from tests.ranks import run_on_ranks

HIDDEN = 64
LENGTHS = (37, 1, 5, 50, 3)  # 96 tokens: no row is padding on 1, 2, 3 or 4 ranks


def rows_and_upstream(num_tokens, batch=1):
    """Returns inputs and output gradients of all tokens, `[2, tokens, batch, hidden]`."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn((2, num_tokens, batch, HIDDEN), generator=generator)


def params_of(lengths, cp, planner, num_samples=1):
    """Returns parameters for these documents, and their plan."""
    from megatron_cp import CPConfig
    from megatron_cp.mask import packed
    from megatron_cp.mcore.batch import ContextParallelParams
    from megatron_cp.plan import make_plan

    plan = make_plan(packed.documents(lengths), cp, CPConfig(planner=planner, topology="cpu"))
    return ContextParallelParams(plans={"full": plan}, num_samples=num_samples), plan


def run_layer(rank, world_size, build, case: Case, planner: str):
    """(plan, output rows, gradient rows, weights, gradients of weights summed over context ranks) of this rank."""
    with parallel_state(case):
        layer = build(case)
        cp_rank = layer.pg_collection.cp.rank()
        params, plan = params_of(LENGTHS, case.cp, planner)
        rows = rows_and_upstream(sum(LENGTHS)).to(layer.in_proj.weight.dtype)
        x, upstream = rows[:, tokens_of(plan, "q")[cp_rank].copy()]
        own = slice(None)
        if case.sequence_parallel:
            share = len(x) // case.tp
            own = slice(rank % case.tp * share, (rank % case.tp + 1) * share)
        x = x[own].clone().requires_grad_()
        out, bias = layer(x, packed_seq_params=params)
        assert bias is None
        out.backward(upstream[own])
        gradients = {}
        for name, weight in layer.named_parameters():
            gradient = weight.grad.clone()
            torch.distributed.all_reduce(gradient, group=layer.pg_collection.cp)
            if case.sequence_parallel and getattr(weight, "sequence_parallel", False):
                torch.distributed.all_reduce(gradient, group=layer.pg_collection.tp)
            gradients[name] = gradient
        weights = {name: weight.detach() for name, weight in layer.named_parameters()}
        return plan, out.detach()[:, 0], x.grad[:, 0], weights, gradients


def run_in_batch(rank, world_size, build, sequences: list[int]):
    """Output rows of these of two sequences side by side, as Megatron cuts them."""
    with parallel_state(Case(cp=world_size)):
        layer = build(Case(cp=world_size))
        x = rows_and_upstream(32, batch=2)[0]
        pieces = torch.arange(32).reshape(2 * world_size, -1)
        rows = torch.cat([pieces[rank], pieces[2 * world_size - 1 - rank]])
        return layer(x[rows][:, sequences])[0].detach()


def run_stream(rank, world_size, build):
    """Two samples of one stream, as the hooks cut them: `[s, b]` holds the rows of the plan column by column."""
    with parallel_state(Case()):
        layer = build(Case())
        x = rows_and_upstream(96)[0]
        params, _ = params_of(LENGTHS, 1, "auto", num_samples=2)
        folded = layer(x.reshape(2, 48, HIDDEN).transpose(0, 1), packed_seq_params=params)[0]
        params, _ = params_of(LENGTHS, 1, "auto")
        return folded.detach(), layer(x, packed_seq_params=params)[0].detach()


def assert_samples_stay_apart(build):
    """Without parameters the samples share one plan, and the layer takes them for more heads."""
    both = run_on_ranks(2, run_in_batch, build, [0, 1], timeout=110)
    for sample in (0, 1):
        alone = run_on_ranks(2, run_in_batch, build, [sample], timeout=110)
        for two, one in zip(both, alone, strict=True):
            torch.testing.assert_close(two[:, [sample]], one, rtol=0, atol=1e-6)


def assert_stream_lies_column_by_column(build):
    """Samples of one stream give what the stream gives."""
    ((folded, plain),) = run_on_ranks(1, run_stream, build, timeout=110)
    torch.testing.assert_close(folded.transpose(0, 1).reshape(96, 1, HIDDEN), plain)


def assert_starts_alike(build, join, of_heads):
    """Weights start the same on two tensor ranks; those of the name `of_heads` are other ones on each."""
    (alone,) = run_on_ranks(1, run_layer, build, Case(), "auto", timeout=110)
    pair = run_on_ranks(2, run_layer, build, Case(tp=2), "auto", timeout=110)
    for name, weight in alone[3].items():
        assert torch.equal(join([r[3] for r in pair], name), weight), name
    assert not torch.equal(pair[0][3][of_heads], pair[1][3][of_heads])


def refusal(rank, world_size, build, mask_name, options):
    """Why a layer with these options, or its pass over 12 tokens under a mask, is refused; None if it is not."""
    with parallel_state(Case()):
        from megatron_cp import CPConfig
        from megatron_cp import mask as masks
        from megatron_cp.mcore.batch import ContextParallelParams
        from megatron_cp.plan import make_plan

        mask = {
            "causal": masks.causal(12),
            "one question, two answers": masks.shared_question([4, 4, 4]),
            "window": masks.sliding_window(12, 3),
        }[mask_name]
        params = ContextParallelParams(plans={"full": make_plan(mask, 1, CPConfig(topology="cpu"))})
        try:
            layer = build(Case(), **options)
            layer(rows_and_upstream(12)[0], packed_seq_params=params)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        return None


def joined(parts, name, sections, *, alike=()):
    """Returns a weight of all heads from those of the tensor ranks; `sections` are its rows on one of them."""
    own = [part[name] for part in parts]
    if name in alike or len(parts) == 1:
        return own[0]
    if name == "out_proj.weight":
        return torch.cat(own, dim=1)
    if sections is None:
        return torch.cat(own)
    by_section = zip(*(part.split(list(sections)) for part in own), strict=True)
    return torch.cat([part for section in by_section for part in section])


def in_order(ranks, case: Case):
    """Returns outputs and gradients of all rows `[tokens, hidden]`, and the token of each."""
    order = torch.from_numpy(tokens_of(ranks[0][0], "q").reshape(-1).copy())
    assert len(order) == sum(LENGTHS)
    holders = ranks if case.sequence_parallel else ranks[:: case.tp]
    return torch.cat([r[1] for r in holders]), torch.cat([r[2] for r in holders]), order


def assert_near(ours, wanted):
    """Ours is fp32: some hundred roundings, at the size of the largest number."""
    assert (ours.double() - wanted).abs().max() <= 3e-6 * wanted.abs().max()


def parts_on_ranks(rank, world_size, build):
    """Parts of the checkpoint of a layer that lies on all ranks as tensor ranks."""
    with parallel_state(Case(tp=world_size)):
        return parts_of_checkpoint(build(Case(tp=world_size)))


def parts_of_checkpoint(layer):
    """Returns what each sharded tensor of a layer's checkpoint is called, and of what it is a part."""
    parts = {}
    for key, tensor in layer.sharded_state_dict(prefix="x.").items():
        pieces = tensor.build() if hasattr(tensor, "build") else [tensor]
        for piece in pieces if isinstance(pieces, list) else pieces.values():
            if hasattr(piece, "global_shape"):
                parts[piece.key] = (key, piece.global_shape)
    return parts
