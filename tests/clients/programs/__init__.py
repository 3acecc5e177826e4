"""Programs of Python's agent frameworks, each run in an environment of its own: they import nothing of ours."""
