"""Contestants of the engine's benchmarks: our engine, raw `llama_decode`, and `python -m llama_cpp.server`."""
