"""OpenAI-compatible servers: the request that is sent to one (`request`), its answer in whatever dialect (`decode`).

`wire` reads values and tool calls of an answer that servers spell differently.
"""
