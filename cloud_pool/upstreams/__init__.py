"""The servers behind the tiers, as the gateway calls them: Triton over gRPC."""
