"""What a call wants of a kernel besides the plain softmax; each of our kernels does one such thing at most."""

from typing import Literal

Feature = Literal["", "softcap", "dropout"]


def feature_of(has_softcap: bool, has_dropout: bool) -> Feature:
    """Returns the feature of a call. Raises NotImplementedError for both at once."""
    if has_softcap and has_dropout:
        raise NotImplementedError(
            "no kernel of ours has softcap and dropout at once; use backend='flex' or 'reference', or 'cpu' on a CPU"
        )
    return "softcap" if has_softcap else "dropout" if has_dropout else ""
