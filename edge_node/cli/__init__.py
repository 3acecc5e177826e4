"""The `causeway-edge` command. `main` holds the commands, `options` their shared flags.

`serve` runs the daemon; `ask` talks to a running one; `doctor/` checks the device; `up/` starts Triton, the
gateway and the daemon together.
"""
