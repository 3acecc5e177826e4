"""A picture classifier from published weights: `torch_file` reads them without torch, `efficientnet` writes ONNX."""
