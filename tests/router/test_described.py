"""Structs that threads read are described at import: msgspec looks up the types of their fields no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from importlib import import_module
import msgspec
module = import_module(f"causeway_server.{sys.argv[1]}")
struct = getattr(module, sys.argv[2])
delattr(module, sys.argv[3])
msgspec.json.Decoder(struct)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "struct", "type_of_field"),
    [
        ("router.openai.wire", "WireChat", "WireMessage"),
        ("router.openai.wire", "WireCompletion", "TokenId"),
        ("router.openai.wire", "WireEmbedding", "TokenId"),
        ("router.openai.responses.request", "WireResponse", "WireItem"),
        ("router.policy.file", "PolicyDoc", "RouteDoc"),
        ("router.bundle.manifest", "BundleManifest", "Blob"),
        ("router.bundle.manifest", "RolloutPlan", "Salt"),
        ("fleet.repository.fleet_file", "FleetDoc", "CohortDoc"),
    ],
)
def test_a_struct_that_threads_read_is_described_at_import(module: str, struct: str, type_of_field: str) -> None:
    command = [sys.executable, "-c", PROGRAM, module, struct, type_of_field]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
