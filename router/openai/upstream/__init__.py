"""The interface to OpenAI-compatible servers: the request's body and the values of an answer (`wire`), and the answer
itself (`decode`).
"""
