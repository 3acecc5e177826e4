"""The cloud. `backend` decides how a request is sent and what its end says of the server; `connection` sends it with a
bearer token; `response_reader` reads the responses; `error_mapping` translates
failures; `health` logs what changes.
"""
