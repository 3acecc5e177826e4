"""The llama.cpp engine: continuous batching over the low-level bindings.

Reading order:

    protocol                values that go in and come out
    engine                  the public API and the engine's thread
    core                    a loaded model: one step builds a batch, decodes it and samples each sequence's token
    scheduling/scheduler    which sequences are in the batch; sequence: the state of one job
    scheduling/kv_cache     KV cells and the sequences that share them; prefix_cache: prefixes kept for later prompts
    scheduling/adapter_turns  LoRA adapters: a batch has one, and they take turns
    scheduling/speculation  draft tokens from text that repeats
    scheduling/thread_tuner threads of a step, found by trying
    scheduling/prompt_store system prompts as files, for an engine that restarts
    sampling/sampler        one token: bias, penalties, grammar, draw; grammar, text_stream, confidence
    prompts, embedding      prompts to tokens; embeddings
    soft_tokens             vectors in a prompt, and their ids
    native/                 ctypes: the model file, the context, the vocabulary, memory, threads and GPUs
    process/                the engine in a child process: parent (asyncio, the daemon's side), frames, child

`Engine` runs in-process in Triton's Python backend, and in a child process for the daemon
(`edge_node/backends/engine/backend.py`).
"""
