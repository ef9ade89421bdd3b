#!/usr/bin/env python
"""Pretrain a GPT with context parallelism. Arguments are those of Megatron-LM.

    torchrun --nproc-per-node 2 pretrain_gpt.py --context-parallel-size 2 --data-path corpus ...

``--help`` lists the flags that are served. The loop is ``megatron_cp/training/pretrain.py``; how a GPT is
built and what one micro-batch does is ``megatron_cp/training/gpt.py``: write your own functions like those
two to train another model.
"""


def main() -> None:
    """Parses, installs what stands in for CUDA on a CPU, and trains."""
    import os
    import sys

    from megatron_cp.training.exit_signal import catch_exit_signal
    from megatron_cp.training.leftovers import end_with_torchrun
    from megatron_cp.training.output import leave_out_what_is_refused

    leave_out_what_is_refused()  # all three before the slow imports
    end_with_torchrun(os.environ)
    catch_exit_signal(sys.argv[1:])

    from megatron_cp.training.arguments import parse_arguments

    config = parse_arguments()

    from megatron_cp.mcore import cpu
    from megatron_cp.mcore.versions import compat

    compat.silence_known_warnings()
    cpu.install()  # before the first import of megatron.core; does nothing where there is a GPU

    from megatron_cp.report.run.media import run_media
    from megatron_cp.training.gpt import (
        check_model,
        flops_provider,
        forward_step,
        logits_step,
        model_provider,
    )
    from megatron_cp.training.pretrain import pretrain

    pretrain(
        config,
        model_provider=model_provider,
        forward_step=forward_step,
        flops_provider=flops_provider,
        model_checker=check_model,
        make_media=run_media,
        logits_step=logits_step,
    )


# A process that Python spawns imports this file (a checkpoint written in the background is one): hence the guard,
# and the imports above stand inside the function.
if __name__ == "__main__":
    main()
