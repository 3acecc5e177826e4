"""From checkpoints to shipped weights: GGUF writer and reader, averaging, quantisation, and what it costs."""
