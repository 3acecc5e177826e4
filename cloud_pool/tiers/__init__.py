"""The tiers that a gateway serves: `tier` (how a request becomes a tier's prompts) and `chat_format` (its model's)."""
