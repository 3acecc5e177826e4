"""Runs Triton Inference Server and the model in it.

`launcher` keeps one server process running (`server_process`: its command line, ports and leftovers; `environment`: its
Python environment; `repository`: its models; `log_filter`: its log). `model_runtime` is the model behind the Python
backend, without Triton's types (`model_request`: its requests and responses); `triton_models` holds what Triton loads.
"""
