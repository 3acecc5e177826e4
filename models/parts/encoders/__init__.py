"""Encoders turn samples and pixels into facts, with the owner's models, as workers of `parts.process`."""
