"""The device's identity and its connection to the control plane.

identity.py        the device's identity and the device key, on disk; join and leave
control_plane.py   addresses that may get tokens; the HTTP client: one method per message, and the published files
tokens.py          the device's token, which is renewed by itself
telemetry.py       sums of requests, sent each minute
connection.py      the daemon's loops: tokens, wakes, status reports, telemetry; the record for `fleet status`
"""
