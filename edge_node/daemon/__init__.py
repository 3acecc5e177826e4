"""The daemon as a process: `lifecycle` (start, background tasks, drain, close), `components` (state for `/readyz` and
metrics), `systemd` (notifications).
"""
