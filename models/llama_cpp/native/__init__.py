"""The modules that use llama.cpp directly: weights, context, vocabulary, bindings, and this machine's resources."""
