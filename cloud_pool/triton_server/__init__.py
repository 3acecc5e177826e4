"""The launcher of Triton Inference Server, and the models that run in it.

`launcher` keeps one server process running and makes its log readable. `server_process` has the server's environment,
models, command line, ports and leftovers. `model_runtime` is the model behind the Python backend, without Triton's
types, and `encoder_runtime` an encoder; `triton_models` holds the models that Triton loads.
"""
