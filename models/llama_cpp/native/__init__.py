"""The modules that use llama.cpp directly: the model file (weights), the decoding context, the vocabulary, the
bindings, and how much memory and how many threads a model may take on this machine.
"""
