"""What tests of the training pipeline need: torch and onnx, which `make test` installs unless it is told not to."""

from __future__ import annotations

import os

import pytest


def need_training_packages() -> None:
    """Skips the test or module where CAUSEWAY_SKIP names torch, and nowhere else: that it went missing is a fault."""
    if "torch" in os.environ.get("CAUSEWAY_SKIP", "").replace(",", " ").split():
        pytest.skip("CAUSEWAY_SKIP names torch", allow_module_level=True)
