import contextlib


class FP8GlobalStateManager:
    FP8_ENABLED = False
    RECIPE = None

    @classmethod
    def is_fp8_enabled(cls):
        return cls.FP8_ENABLED

    @classmethod
    def get_fp8_recipe(cls):
        return cls.RECIPE


@contextlib.contextmanager
def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None):
    manager = FP8GlobalStateManager
    before = manager.FP8_ENABLED, manager.RECIPE
    manager.FP8_ENABLED, manager.RECIPE = enabled, fp8_recipe
    try:
        yield
    finally:
        manager.FP8_ENABLED, manager.RECIPE = before


@contextlib.contextmanager
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    yield
