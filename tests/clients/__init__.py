"""Official clients, unmodified, at the edge and at a gateway, with a scripted model behind both.

The gateway's only tier is the edge daemon, so that each flow at the gateway crosses both servers. `package.json` pins
the clients of npm, which `make setup` installs. `make test-clients` runs Python's agent frameworks (`check_python.py`)
and MCP's conformance suite (`check_mcp.py`).
"""
