"""Clients of the servers behind the tiers: Triton over gRPC."""
