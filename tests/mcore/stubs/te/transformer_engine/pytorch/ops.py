class Sequential:
    """Named in annotations of Megatron alone."""


class FusibleOperation:
    """Named in annotations of Megatron alone."""
