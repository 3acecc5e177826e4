"""Learned signals that a device computes, from small ONNX or JSON files.

    calibration     confidence of the first tokens -> probability that the answer is right
    quality         `edge.quality`: the same probability, from the prompt alone
    encoder         sentence embeddings, for the semantic cache
    onnx_graph      the ONNX Runtime session that quality and encoder share, and the processor that runs it

Each signal about a model's answers belongs to exactly one version of its weights (`judges_sha256` in the manifest);
`catalog/artifact` finds the one for a given model.
The distribution in `models/train` makes the files.
"""
