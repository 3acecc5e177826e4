"""Live sessions over real sockets, with peers that behave and peers that do not."""
