"""The request path of the edge daemon, on real sockets; what generates is scripted so that it can break on cue."""
