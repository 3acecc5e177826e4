"""What runs on a device or inside Triton, and how it is made.

`spec` finds and verifies artifacts, `llama_cpp` runs them, `train` and the `causeway-models` command make them.
"""
