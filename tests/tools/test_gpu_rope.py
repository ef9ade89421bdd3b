"""The check of RoPE in one kernel, on the CPU: it passes what is right, and says how far off what is wrong is."""

from tests.mcore.tiny_gpt import enter_megatron
from tests.ranks import run_on_ranks


def _checked(rank, world_size, scale):
    """What the check says of our rotation times a factor."""
    enter_megatron()
    from megatron_cp.mcore.parts import rope_fusion
    from tools.gpu import rope

    right = rope_fusion.rotate
    rope.DEVICE, rope.rope_fusion.rotate = "cpu", lambda *x: scale * right(*x)
    try:
        return rope.values()
    except AssertionError as error:
        return f"FAILED: {error}"
    finally:
        rope.rope_fusion.rotate = right


def test_a_right_rotation_passes_and_one_that_is_a_hundredth_off_does_not():
    ((right,), (wrong,)) = (run_on_ranks(1, _checked, scale) for scale in (1.0, 1.01))
    assert right.startswith("relative errors ")
    assert wrong.startswith("FAILED: off by ")
