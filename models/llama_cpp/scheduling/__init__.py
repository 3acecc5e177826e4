"""Scheduling of sequences and of the KV cells that they use.

Read scheduler first (with the turns of adapters, and the prefill budget of a step), then sequence (one job), kv_cache
(cells, sharing of cells, and saved prefixes) and prompt_prefixes (sources of prompts' prefixes).
"""
