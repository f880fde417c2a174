"""Registration with PEFT through its public ``register_peft_method``."""

from __future__ import annotations

from peft.utils import register_peft_method

from ...errors import LayerbudgetError
from .config import ExpertsConfig
from .naming import PEFT_NAME, PREFIX, peft_type
from .tuner import ExpertsModel


def register() -> None:
    """Make PEFT know the method; calling it again does nothing.

    Raises:
        LayerbudgetError: Another package registered the same name.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known = PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type())
    if known is ExpertsConfig:
        return
    if known is not None:
        raise LayerbudgetError(
            f"PEFT already has a method named {PEFT_NAME!r} ({known.__module__}).",
            "",
            "Import layerbudget without the other package.",
        )
    register_peft_method(name=PEFT_NAME, config_cls=ExpertsConfig, model_cls=ExpertsModel, prefix=PREFIX)
