"""The control plane over HTTP, for devices, gateways and operators; `fleet/app.py` makes one application of all routes.

plane.py        the parts that routes share, and the background tasks; /healthz, /readyz, /metrics
routes.py       what a route is; errors as JSON; `fleet/openapi.py` makes the OpenAPI document
device_api.py   devices: enrol, token, wake, status, telemetry; gateways: JWKS, revocations
enrolment.py    a join token and a proof → an identity
messages.py     signed messages of devices, many in one transaction; replays and clones
tokens.py       the key that signs ten-minute tokens, and the keys of reports that it gives
refusals.py     the reasons for refusing a device's message, each with a code
wakes.py        parked polls, without aiohttp, which changes of a cohort and revocations wake
connections.py  the number of connections, and the one that is closed for another
files.py        signed metadata and blobs with cache headers; the operators' page of `fleet/console`
"""
