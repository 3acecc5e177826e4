"""The gateway's configuration.

`schema` (every key), `loader` (file and flags), `tiers` with `chat_format` (the models behind the tiers).
"""
