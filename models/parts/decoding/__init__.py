"""Bytes of unknown origin → samples and pixels. Runs in a child process, see `models.parts.process`."""
