"""A model for Triton's stub, as `1/model.py`: the product's own, with a journal line for each call before it runs.

`bed.json` beside this file is {"model": path of the product's model.py, "journal": path}. A call without a mark of the
bed is a gateway's probe or warm-up, and is written as `-`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

_BED = json.loads((Path(__file__).parent / "bed.json").read_text())
_MARK = re.compile(r"qz(\d+)qz")
_spec = importlib.util.spec_from_file_location("product_model", _BED["model"])
assert _spec is not None
assert _spec.loader is not None
_product = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_product)


class TritonPythonModel(_product.TritonPythonModel):  # type: ignore[name-defined,misc]
    def initialize(self, args: dict[str, str]) -> None:
        self._journal = os.open(_BED["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        # The product's model looks for its own folder by these arguments, so nothing else changes.
        super().initialize(args)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            found = _MARK.search(_product.text_of(request, "text_input") or "")
            os.write(self._journal, f"{found[1] if found else '-'}\n".encode())
        super().execute(requests)
