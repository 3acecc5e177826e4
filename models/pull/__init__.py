"""Bring a model here: from a hub repository (hub), a URL, or packages (demo).

`sources` reads what the owner typed, `plan` asks about name, disk and memory before the first byte, `download` fetches
and verifies one file. The result becomes an artifact through `models.publish.add`. Models from packages may be
converted: `efficientnet` reads published weights without torch and writes ONNX with `onnx_writer`.
"""
