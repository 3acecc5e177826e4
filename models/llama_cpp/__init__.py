"""llama.cpp as an engine: continuous batching over the low-level bindings.

    protocol                            values that go in and come out
    engine, step, schedule, sequence    the loop, one step of it, who runs in it, one job's state
    weights, context, vocabulary        what is native: the file, the decoding context, the tokens
    cells, prefixes                     the KV cache: who uses it, and what is remembered of it
    sampling, grammar, text, confidence one token: chosen, held to a schema, shown, judged
    frames, child, parent               the engine in a process of its own, for the daemon

`Engine` is used in-process by Triton's Python backend, and behind `child` by the daemon
(`edge_node/backends/engine/backend.py`).
"""
