"""Bring a model here: from a hub repository or a URL (hub), or from packages (demo).

`plan` reads what the owner typed, and asks about name, disk and memory before the first byte. The result becomes an
artifact through `models.publish.add`. Models from packages may be converted: `efficientnet` reads published weights
without torch and writes ONNX with `onnx_writer`.
"""
