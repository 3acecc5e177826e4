"""Scheduling of sequences and of the KV cells that they use.

Read scheduler first (with the turns of adapters, and how much prefill a step may take), then sequence (one job),
kv_cache (cells, who shares them, and saved prefixes) and prompt_prefixes (where prefixes of prompts are available).
"""
