"""HTTP APIs as values, and the OpenAPI documents that are made from them. Pure.

document      one operation (method, path, parameters, bodies and errors); operations → the document
operations    the operations that the edge and the gateway have in common
"""
