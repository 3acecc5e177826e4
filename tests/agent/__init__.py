"""The box's agent: bundles are fetched, verified, tried and undone; bad days on real parts."""
