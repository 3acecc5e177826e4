"""The cloud. `backend` decides how a request is sent, also as a job, and tells what its end says of the server;
`connection` sends it with a bearer token, reads the stream of an answer, and logs what changes in the server's health;
`responses` reads whole answers and errors.
"""
