"""Variants of a model: which requests a share of them goes to, what is measured of both, and the verdict."""
