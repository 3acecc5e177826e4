"""The control plane over HTTP, for boxes, gateways and operators; `fleet/app.py` makes one application of all routes.

plane.py     the parts that routes share, and the tasks beside them
routes.py    what a route is; errors as JSON; the OpenAPI document, from the routes and their structs
boxes/       the boxes' requests: enrol, token, wake, status, telemetry
wakes.py     parked polls, without aiohttp, and what wakes them: changes of a cohort, revocations
connections.py
             how many connections there are, and which one makes room for another
files.py     signed metadata and blobs with cache headers; the operators' page of `fleet/console`
health.py    /healthz, /readyz, /metrics
"""
