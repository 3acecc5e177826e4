"""Learned signals that a device computes, from small ONNX or JSON files.

    calibration     confidence of the first tokens -> probability that the answer is right
    quality         `edge.quality`: the same probability, from the prompt alone
    encoder         sentence embeddings, for the semantic cache
    agreement       whether two answers say the same
    drift           how far stated probabilities are from what was seen
    shadow          the daemon's file of requests that both sides answered
    onnx_graph      the ONNX Runtime session that quality and encoder share, and the processor that runs it

Each signal about a model's answers belongs to exactly one version of its weights (`judges_sha256` in the manifest);
`catalog/artifact` finds the one for a given model.
The distribution in `models/train` makes the files.
"""

SHADOW_FILE = "shadow-2.sqlite"
"""The file of the daemon's shadow answers. It is defined here, because `shadow` imports numpy."""
