"""The cloud. `backend` decides how a request is sent, also as a job, and tells what its end says of the server;
`connection` sends it with a bearer token, and logs what changes in the server's health; `response_reader` reads the
responses; `error_mapping` translates failures.
"""
