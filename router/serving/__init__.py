"""The server's floor, which daemon, gateway and control plane stand on: the only room of router that touches sockets.

It knows HTTP and the routers' answers, and neither configuration files nor storage: what differs between the three is
an argument. Nothing else in router imports it.
"""
