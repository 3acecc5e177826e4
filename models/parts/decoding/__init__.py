"""Untrusted bytes → samples and pixels. The decoders run in a child process, see `models.parts.process`."""
