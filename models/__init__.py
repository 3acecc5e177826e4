"""The engine that runs models on a device and inside Triton, the learned router signals, and tools that bring models.

Reading order: `catalog` (artifacts), `llama_cpp` (the engine), `chat` and `constraints` (what models read and what they
must answer), `signals` (the router signals), `semantic` (which questions mean the same), `parts` (audio clips and
images), then the tools: `pull`, `publish` and `cli`. `train` is a distribution of its own.

Importing this package turns the telemetry of ONNX Runtime off, in this process and its children.
"""

import os

# From 1.29 its wheels for Linux send names and hashes of models, counts and errors to Microsoft by default. The
# variable counts at the first import of onnxruntime, which only modules of this package and their libraries import.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
