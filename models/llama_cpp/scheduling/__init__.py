"""Which sequences run together and which KV cells they use.

Read scheduler first, then sequence (one job), kv_cache (cells and who shares them), prefix_cache (prefixes of finished
sequences) and throughput (how much prefill a step may take).
"""
