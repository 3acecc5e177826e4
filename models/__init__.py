"""Models: the engine that runs them on a device and inside Triton, router signals, and how both are made.

Reading order: `catalog` (artifacts), `llama_cpp` (the engine), `function_calls` and `chat` (what the assistants read
and answer), `signals` (the router signals), `evaluate`, `publish`, `train`, `cli`.
"""
