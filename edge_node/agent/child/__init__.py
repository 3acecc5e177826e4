"""The child process that inspects updates: `python -m edge_node.agent.child`, started by `agent.inspection`."""
