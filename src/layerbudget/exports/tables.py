"""A plan as plain tables: what every other tool can read."""

from __future__ import annotations

import csv
import io
import json

from ..plan import Plan


def layers_json(plan: Plan) -> str:
    """``{module: value}`` in the model's own order."""
    counted = plan.kind in ("ranks", "experts")
    values = {m: b.count if counted else b.value for b in plan.blocks for m in b.modules}
    return json.dumps(values, indent=1) + "\n"


def blocks_csv(plan: Plan) -> str:
    """``block,value,count,parameters,modules``, one row per block; modules are separated by blanks."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("block", "value", "count", "parameters", "modules"))
    rows.writerows((b.name, repr(b.value), b.count, b.numel, " ".join(b.modules)) for b in plan.blocks)
    return text.getvalue()
