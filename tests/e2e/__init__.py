"""The whole product on real parts: edge daemon, engine process, gateway and Triton, over real sockets."""
