"""Tests of the room `cloud_pool.tiers`."""
