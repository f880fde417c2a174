"""The format of every weight matrix, files that runtimes read, recipes for other tools. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry import lazy_names

if TYPE_CHECKING:
    from .apply import apply_bits as apply_bits
    from .apply import write_bits as write_bits
    from .blocks import formats_table as formats_table
    from .blocks import unwritable as unwritable
    from .forecast import both_uses as both_uses
    from .forecast import choosing as choosing
    from .plan import check_record as check_record
    from .plan import empty_table as empty_table
    from .plan import measured_formats as measured_formats
    from .plan import need_sequences as need_sequences
    from .plan import plan_bits as plan_bits
    from .plan import refuse_measuring as refuse_measuring
    from .receipt import QuantisationReceipt as QuantisationReceipt
    from .request import BitsWrite as BitsWrite
    from .sensitivity import DenseOutput as DenseOutput

__getattr__ = lazy_names(
    __name__,
    {
        "apply": "apply_bits write_bits",
        "receipt": "QuantisationReceipt",
        "blocks": "formats_table unwritable",
        "forecast": "both_uses choosing",
        "plan": "check_record empty_table measured_formats need_sequences plan_bits refuse_measuring",
        "request": "BitsWrite",
        "sensitivity": "DenseOutput",
    },
)
