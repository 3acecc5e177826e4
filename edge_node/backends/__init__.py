"""Backends that generate answers: `backend` is the interface; `engine` the models on this device; `cloud` an OpenAI
server.
"""
