"""From checkpoints to shipped weights: GGUF writer and reader, averaging, quantisation, and the measured cost of
quantisation.
"""
