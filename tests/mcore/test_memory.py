"""Less memory by one call, for a model or for all that a process builds."""

from tests.mcore.packs import VOCABULARY
from tests.mcore.test_row_chunks import Widest
from tests.mcore.tiny_gpt import Case, Trainer, parallel_state
from tests.ranks import run_on_ranks


def _widest(rank, world_size, wishes):
    """The most rows of logits and inside an MLP that a step holds, with wishes for every model and without."""
    found = []
    case = Case(attention="planned", steps=1).with_options(hidden_size=48)
    with parallel_state(case) as groups:
        from megatron_cp.mcore import save_memory_in_every_gpt

        try:
            for given in (wishes, {}):
                save_memory_in_every_gpt(**given)
                trainer = Trainer(case, groups)
                with Widest((VOCABULARY, trainer.config.ffn_hidden_size)) as widest:
                    trainer.step()
                found.append(list(widest.rows.values()))
        finally:
            save_memory_in_every_gpt()
    return found


def test_every_model_of_a_process_is_served_until_it_is_said_otherwise():
    wishes = {"loss_chunk_size": 16, "mlp_chunks": 4, "offload_recompute_inputs": True}
    ((wished, plain),) = run_on_ranks(1, _widest, wishes)
    assert (wished, plain) == ([16, 32], [128, 128])  # nothing is recomputed, so nothing waits
