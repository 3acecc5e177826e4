"""Authentication: a bearer token -> Principal, on every request, in microseconds for a token that was seen before.

    config.py          accepted tokens
    authenticator.py   `Authorization` header -> Principal: static or signed tokens; the static ones
    token_verifier.py  signed token -> claims, checked at `now`; a bounded cache of verified tokens; the keys in use
    key_set.py         the public keys as a JWKS file has them
    revocation.py      tokens and devices that are refused before they expire: a list in Redis, a copy in each gateway
    fleet.py           keys and revocations of a fleet's control plane, read over HTTP
    issuing.py         new keys and new tokens, for `causeway-cloud keys`

A signed token is a JWT (RFC 7519) with an Ed25519 signature (RFC 8037). Only this algorithm is accepted, keys come
from the key set alone (`jwk`, `jku`, `x5u` and `x5c` headers are ignored), and no claim is used before the signature
was verified.
"""
