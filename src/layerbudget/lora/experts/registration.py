"""Registration with PEFT through its public ``register_peft_method``.

PEFT asks that ``PeftType`` have a member of the method's name, and ``PeftType`` is an enumeration without an extension
point. The member is therefore added here, once; nothing else of PEFT is touched.
"""

from __future__ import annotations

from peft.utils import register_peft_method
from peft.utils.peft_types import PeftType

from ...errors import LayerbudgetError
from .config import PEFT_NAME, PREFIX

_MEMBER = PEFT_NAME.upper()


def peft_type() -> PeftType:
    """Return the enumeration member ``PeftType.LORA_EXPERTS``, adding it where PEFT does not have it."""
    if _MEMBER not in PeftType.__members__:
        member = str.__new__(PeftType, _MEMBER)
        member._name_ = _MEMBER
        member._value_ = _MEMBER
        PeftType._member_map_[_MEMBER] = member
        PeftType._member_names_.append(_MEMBER)
        PeftType._value2member_map_[_MEMBER] = member
        type.__setattr__(PeftType, _MEMBER, member)
    return PeftType[_MEMBER]


def register() -> None:
    """Make PEFT know the method; calling it again does nothing.

    Raises:
        LayerbudgetError: Another package registered the same name.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    from .config import ExpertsConfig
    from .tuner import ExpertsModel

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
