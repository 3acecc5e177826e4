"""Bring a model here: from a hub repository (hub), a URL, or the demonstration packages (demo).

`sources` reads what the owner typed, `plan` asks about name, disk and memory before the first byte, `download` fetches
and verifies one file. The result becomes an artifact through `models.publish.add`. `packaged` models may be converted:
`torch_file` reads published weights without torch, `efficientnet` and `onnx_writer` write ONNX.
"""
