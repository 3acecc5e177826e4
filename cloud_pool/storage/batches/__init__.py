"""Batches in Redis, and the life of one."""
