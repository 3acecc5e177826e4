"""Which sequences run together and which KV cells they use.

Read scheduler first, then sequence (one job), kv_cache (cells and who shares them), prompt_prefixes (where prefixes of
prompts are available), adapter_turns (one adapter for each batch) and throughput (how much prefill a step may take).
"""
