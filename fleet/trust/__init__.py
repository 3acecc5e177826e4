"""The keys, roles and signatures of a fleet, by The Update Framework (python-tuf).

The resulting repository is a folder of static files for any web server or CDN. Devices verify it in `edge_node/agent`.
"""
