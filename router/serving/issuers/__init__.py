"""Tokens of an owner's OpenID Connect issuer (OpenID Connect Discovery 1.0, RFC 7519, 8725).

    config     the issuers that are trusted, and which of their claims say what
    keys       public keys as a JWKS has them, and signatures by them
    documents  an issuer's documents over HTTP, bounded in bytes and time
    issuer     the keys of one issuer: read again before they are old, and when a token has another one
    claims     what the claims of a verified token must say, and what they mean
    tokens     token -> identity: signature, claims, a bounded cache

Edge and gateway accept tokens by it; the control plane signs its operators in by `keys` and `documents`.
"""
