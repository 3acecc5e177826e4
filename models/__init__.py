"""Models: the engine that runs them on a device and inside Triton, router signals, and how both are made.

Reading order: `catalog` (artifacts), `llama_cpp` (the engine), `function_calls` and `chat` (what the assistants read
and answer), `signals` (the router signals), `semantic` (which questions mean the same), `modalities` (sounds and
pictures), then how models come: `pull`, `calibrate`, `evaluate`, `publish`, `train`; `cli`.
"""
