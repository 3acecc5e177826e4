"""The control plane; its first room: checking policies and running their cases."""
