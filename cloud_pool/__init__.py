"""The gateway before the Triton pool, and the models that Triton runs."""
