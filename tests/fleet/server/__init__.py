"""The control plane on real sockets and real databases."""
