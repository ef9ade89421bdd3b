"""The CPU stand-ins come before Megatron-Core in this process too: ranks forked later inherit both."""

import pytest

from tests.mcore.tiny_gpt import enter_megatron


@pytest.fixture(autouse=True, scope="package")
def _stand_ins_before_megatron():
    enter_megatron()
    import torch._dynamo  # noqa: F401  by the first optimizer, else in every rank
