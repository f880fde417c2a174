"""The method's name in PEFT, and the member of PEFT's enumeration that carries it.

PEFT asks that ``PeftType`` have a member of the method's name, and ``PeftType`` is an enumeration without an extension
point. The member is therefore added here, once; nothing else of PEFT is touched.
"""

from __future__ import annotations

from peft.utils.peft_types import PeftType

PEFT_NAME = "lora_experts"
PREFIX = "lora_experts_"
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
