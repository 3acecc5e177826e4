"""Rollouts: life, membership, windows, and the verdict with its error rates."""
