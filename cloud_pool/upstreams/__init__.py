"""Upstreams: the servers that generate for tiers.

Reading order: `inference` (what is asked and answered, and the interface of every kind), `openai_http` (a server with
OpenAI's HTTP API), `triton` (gRPC), `clients` (one client for each address), `config`, `features`.
"""
