"""A real control plane beside thousands of boxes that speak its protocol. `python -m tests.bed.fleet` runs it."""
