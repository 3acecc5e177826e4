"""The gRPC service of the gateway, over real sockets, with peers that behave and peers that do not."""
