"""llama.cpp as an engine: continuous batching over the low-level bindings.

protocol — the values that go in and come out; engine — the batching loop (one thread); child — the same engine behind a
socketpair, for the daemon. Triton's Python backend uses `Engine` in its own process.
"""
