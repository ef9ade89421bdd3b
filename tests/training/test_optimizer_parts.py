"""Groups of parameters that a checkpoint's optimizer has, against those of the run's."""

from types import SimpleNamespace

import pytest

from megatron_cp.training.checkpoint.optimizer_parts import check_groups


def optimizer(*num_groups: int) -> SimpleNamespace:
    """An optimizer of one part, or with experts of several, each of so many groups."""
    parts = [SimpleNamespace(param_groups=[{}] * number) for number in num_groups]
    return parts[0] if len(parts) == 1 else SimpleNamespace(chained_optimizers=parts)


def saved(*num_groups: int, inner: bool = False) -> dict:
    """What a checkpoint holds of it, the last part first, beside a key that is no part's number."""
    parts = [{"param_groups": [{}] * number} for number in num_groups]
    parts = [{"optimizer": part, "scale": 1.0} for part in parts] if inner else parts
    if len(parts) == 1:
        return parts[0]
    numbered = dict(enumerate(parts))
    return {"param_state_sharding_type": "dp", **dict(reversed(numbered.items()))}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("before", [(2,), (3,), (2, 1), (1, 2), (2, 2), (2, 1, 1)])
@pytest.mark.parametrize("now", [(2,), (2, 1), (1, 2), (2, 1, 1)])
def test_only_as_many_parts_with_other_numbers_of_groups_are_refused(now, before, inner):
    other = [(b, n) for b, n in zip(before, now, strict=False) if b != n]
    if len(before) != len(now) or not other:
        check_groups("folder", optimizer(*now), saved(*before, inner=inner))
        return
    with pytest.raises(ValueError, match=rf"has {other[0][0]} groups .*this run {other[0][1]},"):
        check_groups("folder", optimizer(*now), saved(*before, inner=inner))
