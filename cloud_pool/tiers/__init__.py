"""The tiers that a gateway serves: `tier` has their chat formats, and how a request becomes a tier's prompts."""
