"""The client half of HTTP: `client` pools connections to one server, `connection` brings an answer as it arrives."""
