"""The cloud. `backend` decides how a request is sent, also as a job, and judges the server's health by its end;
`connection` sends it with a bearer token, reads the stream of an answer, and logs changes in the server's health;
`responses` reads whole answers and errors.
"""
