"""The whole product on real parts: edge daemon, engine child, gateway, Triton, over real sockets."""
