"""The cloud. `backend` has the clouds of a device: it decides how a request is sent to one, also as a job, and judges
the server's health by its end; `connection` probes the server and logs changes in its health.
`router/serving/upstream` sends requests and reads answers.
"""
