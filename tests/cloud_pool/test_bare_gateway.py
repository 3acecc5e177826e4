"""What a gateway without optional parts does not import: each of these packages costs it memory and time to start."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("numpy", "gguf", "grpc", "tritonclient", "onnxruntime", "llama_cpp", "jsonschema", "nats", "aiokafka")


@pytest.mark.slow
def test_bare_gateway_imports_no_heavy_package() -> None:
    program = "import sys, causeway_server.cloud_pool.app, causeway_server.cloud_pool.cli.background; "
    program += f"print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
