"""The keys, roles and signatures of a fleet, by The Update Framework (python-tuf).

The repository that results is a folder of static files, which any web server or CDN can carry. A device verifies it in
`edge_node/agent`.
"""
