"""The modules that use llama.cpp directly: the model file (weights), the decoding context, the vocabulary, the
bindings, and the choice of memory and threads for this machine.
"""
