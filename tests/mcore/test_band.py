"""The static mask of a layer: which keys a query sees beside its own, with Megatron's words for it."""

import numpy as np
import pytest

WINDOWS = [None, (4, 0), (-1, 0), (0, 0), (3, 2), (-1, -1), (-1, 5)]
LENGTHS, CP = (13, 24, 7), 2


def allowed(distance, window, is_causal):
    """Megatron's rule: `window` counts keys to the left and to the right, -1 all; causal sees none to the right."""
    left, right = window or (-1, -1)
    right = 0 if is_causal else right
    return (left < 0 or -distance <= left) and (right < 0 or distance <= right)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mask_type", ["causal", "padding_causal", "no_mask", "padding"])
def test_documents_in_megatrons_split_see_what_their_layers_window_says(mask_type, window):
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_cp import CPConfig
    from megatron_cp.mcore.documents.split import band_of, plan_of_split

    padded = [-(-n // (2 * CP)) * 2 * CP for n in LENGTHS]
    starts = tuple(np.cumsum([0, *padded]).tolist())
    band = band_of(AttnMaskType[mask_type], window)
    dense = plan_of_split(starts, LENGTHS, CP, band, CPConfig()).mask.to_dense()
    expected = np.zeros_like(dense)
    for start, length in zip(starts, LENGTHS, strict=False):
        for q in range(length):
            for k in range(length):
                expected[start + q, start + k] = allowed(k - q, window, "causal" in mask_type)
    assert np.array_equal(dense, expected)
