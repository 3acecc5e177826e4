"""Who asks: bearer tokens → a Principal, on every request, in microseconds where the token was seen before.

    settings      what tokens this gateway takes
    keyset        the public keys, a JWKS file that is read again when it changes
    claims        what a token says, and which of it is believed: a pure function of the claims and `now`
    verifier      token → claims, by the keys; a bounded cache of those verified
    revocation    tokens and devices that are refused before they expire: a list in Redis, a copy here
    gate          `Authorization` → Principal: static tokens or signed ones
    issuing       the other side: new keys, new tokens
    commands      `causeway-cloud keys`

A token is a JWT (RFC 7519) signed with Ed25519 (RFC 8037). One algorithm is taken, keys come from the key set alone
(`jwk`, `jku`, `x5u` and `x5c` in a header are never looked at), and nothing inside is believed before the signature
holds.
"""
