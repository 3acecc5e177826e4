"""Samples and pixels → facts, by models that the owner installs: each is a worker of `models.parts.process`."""
