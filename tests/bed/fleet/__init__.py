"""A real control plane beside thousands of devices that speak its protocol: `python -m tests.bench rollouts`."""
