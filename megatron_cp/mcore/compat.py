"""Megatron-Core versions: the only module that asks for one.

One source serves megatron-core 0.16.1 (Python <= 3.11) to 0.20. What differs between them and
concerns us is decided here, by looking at what is there rather than at numbers wherever that is
possible.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import warnings
from typing import Any

OLDEST, TOO_NEW = (0, 16, 1), (0, 21, 0)


def megatron_version() -> tuple[int, int, int]:
    """Returns the version of the installed megatron-core, e.g. (0, 16, 1).

    Raises:
        ImportError: if it is not installed.
    """
    # The imported package knows best: a source tree on PYTHONPATH shadows what is installed.
    try:
        package_info = importlib.import_module("megatron.core.package_info")
        text = str(package_info.__version__)
    except ImportError:
        text = importlib.metadata.version("megatron-core")
    numbers = [int(number) for number in re.findall(r"\d+", text)[:3]]
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    return major, minor, patch


def check_megatron_version() -> None:
    """Returns if the installed megatron-core is one that this package was written for.

    Raises:
        ImportError: naming the version found and the versions allowed.
    """
    found = megatron_version()
    if not OLDEST <= found < TOO_NEW:
        raise ImportError(
            f"megatron-core {_dotted(found)} is installed; megatron_cp needs "
            f">={_dotted(OLDEST)},<{_dotted(TOO_NEW)}; "
            "install one of these: pip install "
            f"'megatron-core>={_dotted(OLDEST)},<{_dotted(TOO_NEW)}'"
        )


def has_transformer_engine() -> bool:
    """Returns whether Transformer Engine's torch part is there; Megatron then prefers its modules.

    The bare index package `transformer-engine` has no torch part and makes `import megatron.core`
    itself fail.
    """
    try:
        return importlib.util.find_spec("transformer_engine.pytorch") is not None
    except (ImportError, RuntimeError):  # the bare package raises on import
        return False


def counts_mtp_tokens_per_rank() -> bool:
    """Returns whether multi-token prediction weighs its loss by each rank's own count of tokens.

    It does so since 0.17 under `calculate_per_token_loss`, which is exact only if all context ranks
    count alike.
    """
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "process_mtp_loss")


def has_fused_adam() -> bool:
    """Returns whether Megatron took its Adam from Transformer Engine or apex, not from torch."""
    from megatron.core.optimizer import distrib_optimizer

    return bool(distrib_optimizer.HAVE_APEX_OR_TE)


def local_layer_spec(**wishes: Any) -> Any:
    """Returns Megatron's layer spec without Transformer Engine."""
    from megatron.core.models.gpt import gpt_layer_specs

    return gpt_layer_specs.get_gpt_layer_local_spec(**wishes)


def transformer_engine_layer_spec(**wishes: Any) -> Any:
    """Returns Megatron's layer spec on Transformer Engine. It needs a GPU and never ran on one."""
    from megatron.core.models.gpt import gpt_layer_specs

    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**wishes)


def repair_local_moe_and_mla() -> None:
    """Makes experts and multi-latent attention usable without Transformer Engine on 0.16.1.

    0.16.1 names a Transformer Engine function that it never imported (`NameError: te_general_gemm`)
    and takes Transformer Engine for installed in multi-latent attention. Later versions repaired
    both; then nothing is touched.
    """
    if has_transformer_engine():
        return
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if getattr(multi_latent_attention, "HAVE_TE", False):
        multi_latent_attention.HAVE_TE = False


def silence_known_warnings() -> None:
    """Drops warnings of Megatron-Core that nobody here can act on.

    They are its notes at import that apex and Transformer Engine are missing (our choice), and
    torch's that it uses collectives and sharded tensors under their old names.
    """
    warnings.filterwarnings("ignore", message="Apex is not installed")
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
    warnings.filterwarnings("ignore", message="Please use DTensor instead")


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
