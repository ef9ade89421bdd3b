"""Who is timed on a GPU beside the plain kernels."""

import pytest
import torch

from tools.gpu import cases, peers


@pytest.mark.parametrize(
    ("mask_name", "head_dim", "expected"),
    [("causal", 64, 2), ("causal", 128, 2), ("full", 128, 0), ("causal", 96, 0)],
)
def test_softcap_and_dropout_are_timed_beside_the_plain_kernels(
    monkeypatch, mask_name, head_dim, expected
):
    asked = []

    def attend(q, k, v, mask, **wishes):
        asked.append(wishes)
        return q * 1.0, None

    monkeypatch.setattr(peers, "attend", attend)
    case = cases.Case(mask_name, cases.KILO, head_dim, head_dim, 2, 2)
    x = peers.draw(case, "cpu", torch.float32)
    made = peers.with_features(case, case.mask(), x)
    assert [one.name for one in made] == ["hopper, softcap", "hopper, dropout"][:expected]
    for one in made:
        one.forward()
    wanted = [{"softcap": 20.0}, {"dropout_p": 0.1}][:expected] * 2
    assert asked == [{"backend": "hopper", **wishes} for wishes in wanted]
