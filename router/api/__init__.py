"""HTTP APIs as values, and the OpenAPI documents that are made from them. Pure.

document      one operation (method, path, parameters, bodies and errors); operations → the document
reader        operations as YAML documents write them → operations; `operations.yaml`: those of both edge and gateway
operations    the types that `operations.yaml` names
"""
