"""The daemon as a process: `lifecycle` (start, background tasks, drain, close), `components` (state for `/readyz` and
metrics), `optional_parts` (what only some boxes have), `manifests`, `bundles` and `fleet` (models, bundles and the
control plane as the daemon uses them), `systemd` (notifications).
"""
