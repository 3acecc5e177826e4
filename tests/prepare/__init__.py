"""The set-up of a checkout: `python3 -m tests.prepare run|test|quick|check|bench|vllm|train|lock`.

The package runs before anything is installed, on the system's Python, so it uses the standard library only, and its
grammar stays old enough (3.8) to report an unsupported Python instead of failing on it.

A set-up is a list of steps (`plan`). The key of a step is a hash of everything on which its result depends. A finished
step stores its key as a stamp, and a step with a valid stamp is skipped. So a second run takes a few milliseconds, and
an interrupted one continues. Slow builds are compiled once per machine and kept in a cache outside the checkout
(`llama`).
"""
