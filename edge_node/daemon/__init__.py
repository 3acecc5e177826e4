"""The daemon as a process: `lifecycle` (start, background tasks, drain, close), `components` (state for `/readyz` and
metrics), `optional_parts` (components that only some devices have), `fleet` (the control plane and its bundles as the
daemon uses them).
"""
