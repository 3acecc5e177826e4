"""The program `causeway-edge`. `main` holds the commands, and `options` their shared flags.

`serve` runs the daemon; `ask` talks to a running daemon; `doctor/` checks the device; `up/` starts Triton, the gateway
and the daemon together.
"""
