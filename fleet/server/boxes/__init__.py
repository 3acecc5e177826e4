"""The boxes' side of the control plane.

api.py         enrol, token, wake, status, telemetry; for gateways: JWKS, revocations
enrolment.py   a join token and a proof → an identity
messages.py    signed messages of boxes, many in one transaction; replays and clones
tokens.py      the key that signs ten-minute tokens, and the keys of reports that it gives
refusals.py    why a box's message is refused, each with a code
"""
