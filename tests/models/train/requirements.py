"""Packages for the tests of the training pipeline: torch and onnx, which `make test` installs by default."""

from __future__ import annotations

import os

import pytest


def need_training_packages() -> None:
    """Skip the test or module if CAUSEWAY_SKIP names torch. If torch is missing otherwise, the tests must fail."""
    if "torch" in os.environ.get("CAUSEWAY_SKIP", "").replace(",", " ").split():
        pytest.skip("CAUSEWAY_SKIP names torch", allow_module_level=True)
