"""The llama.cpp engine: continuous batching over the low-level bindings.

Reading order:

    protocol                values that go in and come out
    engine                  the public API and the engine's thread
    core                    a loaded model: one step builds a batch, decodes it and samples each sequence's token
    scheduling/scheduler    the sequences in the batch; adapters take turns; sequence: the state of one job
    scheduling/kv_cache     KV cells, the sequences that share them, and prefixes saved for later prompts
    scheduling/prompt_prefixes  stored beginnings of prompts, in memory or in a file
    scheduling/speculation  draft tokens from text that repeats
    sampler                 one token: bias, penalties, grammar, draw; its confidence
    prompts                 prompts to tokens; vectors in a prompt, their ids and places
    embedding               embeddings
    native/                 ctypes: the model file, the context, the vocabulary, memory, threads and GPUs
    process/                the engine in a child process: parent (asyncio, the daemon's side), child

`Engine` runs in-process in Triton's Python backend, and in a child process for the daemon
(`edge_node/backends/engine/backend.py`).
"""
