"""Small runs inside a rank of `tests.ranks`, and checkpoints written by hand.

Nothing of `megatron_cp.training.checkpoint` writes or reads here: names and values are those of the lists below,
as Megatron-LM and Transformer Engine name them.
"""

import contextlib
import hashlib
import io
import json
import zlib
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load

from tests.mcore.tiny_gpt import Case, parallel_state
from tests.training.commands import SMALL_RUN

VOCABULARY = 512
# One layer of the model of SMALL_RUN, without its norms.
LAYER = {
    "self_attention.linear_proj.weight": (64, 64),
    "self_attention.linear_qkv.weight": (128, 64),
    "mlp.linear_fc1.weight": (256, 64),
    "mlp.linear_fc2.weight": (64, 128),
}
LOCAL_NORMS = {"input_layernorm.weight": (64,), "pre_mlp_layernorm.weight": (64,)}
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": (64,),
    "mlp.linear_fc1.layer_norm_weight": (64,),
}
FUSED_OF = dict(zip(LOCAL_NORMS, FUSED_NORMS, strict=True))
OUTSIDE = {
    "embedding.word_embeddings.weight": (VOCABULARY, 64),
    "decoder.final_layernorm.weight": (64,),
}
# Where Transformer Engine 2 keeps an `_extra_state`.
EXTRA = (
    "self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv",
    "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
NUM_LAYERS = 2


def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The number of a weight, told by its local name: small, different everywhere, exact in fp32."""
    start = zlib.crc32(name.encode()) % 1000
    return (torch.arange(start, start + torch.Size(shape).numel()) % 1021).reshape(shape) / 1024


def local_weights() -> dict[str, torch.Tensor]:
    """The weights under the names of Megatron's own layers."""
    weights = {name: value(name, shape) for name, shape in OUTSIDE.items()}
    for layer in range(NUM_LAYERS):
        for name, shape in (LAYER | LOCAL_NORMS).items():
            full = f"decoder.layers.{layer}.{name}"
            weights[full] = value(full, shape)
    return weights


def fused_weights() -> dict[str, torch.Tensor]:
    """The same weights under the names of Transformer Engine's layers."""
    renamed = {}
    for name, tensor in local_weights().items():
        for local, fused in FUSED_OF.items():
            name = name.replace(f".{local}", f".{fused}")
        renamed[name] = tensor
    return renamed


def extra_states(kind: str) -> dict[str, object]:
    """Transformer Engine's `_extra_state` entries without fp8, as version 2 or 1 writes them, or with fp8."""

    def entry() -> object:
        if kind == "version 2":
            return torch.empty(0, dtype=torch.uint8)
        if kind == "with fp8":
            return torch.ones(5, dtype=torch.uint8)
        saved = io.BytesIO()
        torch.save(None, saved)
        return saved

    places = [f"decoder.layers.{i}.{name}" for i in range(NUM_LAYERS) for name in EXTRA]
    return {f"{name}._extra_state": entry() for name in (*places, "decoder.final_layernorm")}


def stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as the format torch_dist keeps them: all layers of a kind in one tensor."""
    result = {name: x for name, x in weights.items() if ".layers." not in name}
    for name in [name for name in weights if ".layers.0." in name]:
        every = [weights[name.replace(".0.", f".{i}.", 1)] for i in range(NUM_LAYERS)]
        result[name.replace(".layers.0.", ".layers.")] = torch.stack(every)
    return result


def write_legacy(folder: Path, weights: dict[str, object], **entries: object) -> Path:
    """A checkpoint of Megatron-LM in the format torch, of one rank; returns its iteration's folder."""
    own = folder / "iter_0000005" / "mp_rank_00"
    own.mkdir(parents=True)
    content = {"model": weights, "iteration": 5, "checkpoint_version": 3.0, **entries}
    torch.save(content, own / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return own.parent


def write_dist(
    folder: Path, weights: dict[str, torch.Tensor], extra: dict[str, object], **entries: object
) -> Path:
    """A checkpoint of Megatron-Core in the format torch_dist, by one rank that has process groups."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from megatron_cp.training.checkpoint.writer import saving_in_this_process

    own = folder / "iter_0000005"
    own.mkdir(parents=True)
    state: dict[str, object] = {"iteration": 5, "checkpoint_version": 3.0, **entries}
    for name, tensor in weights.items():
        state[name] = ShardedTensor.from_rank_offsets(name, tensor)
    for name, entry in extra.items():
        head, dot, tail = name.partition(".layers.")
        layer, _, rest = tail.partition(".")
        key = f"{head}.layers.{rest}" if dot else name
        grid, place = ((NUM_LAYERS,), (int(layer),)) if dot else ((1,), (0,))
        if name in ("rng_state", "rerun_state_machine_state"):
            grid, place = (1, 1), (0, 0)
        state[name] = ShardedObject(key, entry, grid, place)
    with saving_in_this_process():
        dist_checkpointing.save(state, str(own))
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return own


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint in the format torch_dist: weights, moments, main copies."""
    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(m.size, dtype=m.properties.dtype)
        for name, m in entries.items()
        if hasattr(m, "size")
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def rewrite_manifest(folder: Path, change) -> None:
    """Changes a manifest as one who wants it believed: its own SHA-256 follows, format 1 has none."""
    path = folder / "megatron_cp.json"
    content = json.loads(path.read_text())
    content.pop("manifest_sha256", None)
    change(content)
    if content["format"] != 1:
        text = json.dumps(content, sort_keys=True).encode()
        content["manifest_sha256"] = hashlib.sha256(text).hexdigest()
    path.write_text(json.dumps(content))


def arguments(*flags: str, rank: int = 0, world_size: int = 1):
    """The configuration of a small run."""
    from megatron_cp.training.arguments import parse_arguments

    config = parse_arguments(
        [*SMALL_RUN, *flags], {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    )
    return config.with_arguments(padded_vocab_size=VOCABULARY)


@contextlib.contextmanager
def run_state(*flags: str, rank: int = 0, world_size: int = 1):
    """Model, optimizer and schedule of a small run, before its first step."""
    config = arguments(*flags, rank=rank, world_size=world_size)
    case = Case(
        tp=config.parallel.tensor_model_parallel_size,
        pp=config.parallel.pipeline_model_parallel_size,
        cp=config.parallel.context_parallel_size,
    )
    with parallel_state(case):
        from megatron_cp.training import pretrain, setup
        from megatron_cp.training.checkpoint.load import follow_release
        from megatron_cp.training.gpt import model_provider

        config = follow_release(config)
        allow_children()
        setup.set_seeds(config)
        state, _, _ = pretrain._build(config, model_provider, torch.device("cpu"))
        yield state


def allow_children() -> None:
    """The pool's workers are daemons, which may not have children; Megatron's writers are."""
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False


def weights_of(state) -> dict[str, torch.Tensor]:
    """A copy of the weights that a run holds."""
    from megatron.core.utils import unwrap_model

    chunks = unwrap_model(state.model)
    return {n: p.detach().clone() for chunk in chunks for n, p in chunk.named_parameters()}


def step(state, number: int, *, overflows: bool = False) -> None:
    """One update of the optimizer with made-up gradients, so that there are moments to compare.

    Where they overflow, a loss scale that adapts skips the update.
    """
    for place, chunk in enumerate(state.model):
        for index, parameter in enumerate(chunk.parameters()):
            parameter.main_grad.copy_(
                value(f"{number} {place} {index}", tuple(parameter.shape)) - 0.3
            )
            if overflows:
                parameter.main_grad.fill_(float("inf"))
    state.optimizer.step()
    state.scheduler.step(increment=state.config.steps.global_batch_size)
    state.iteration += 1


def answer(call) -> str:
    """What a call refuses with; fails if it does not refuse."""
    try:
        call()
    except ValueError as refusal:
        return str(refusal)
    raise AssertionError("nothing was refused")
