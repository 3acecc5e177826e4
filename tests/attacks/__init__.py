"""Attacks on the gateway, and where each is tested:

forged, expired, early, foreign and oversized tokens; wrong audience or issuer; `alg: none`; a public key as an HMAC
secret; keys that the token brings
    tests/cloud_pool/accounts/identity/test_token_verifier.py; over HTTP
    tests/cloud_pool/accounts/identity/test_over_http.py; everywhere tests/attacks/test_tokens.py
revoked tokens, devices and keys
    tests/cloud_pool/accounts/identity/test_revocation.py; over HTTP
    tests/cloud_pool/accounts/identity/test_over_http.py
a token of another scope
    tests/cloud_pool/accounts/identity/test_over_http.py, tests/cloud_pool/jobs/test_api.py
another tenant's job, its events and its cancelling; another tenant's files and batches
    tests/cloud_pool/jobs/test_api.py, tests/cloud_pool/batches/test_batches.py; with signed tokens and a whole gateway
    tests/attacks/test_tenants.py
webhooks to loopback, link-local, private, mapped, NAT64 and 6to4 addresses
    the rules tests/cloud_pool/jobs/test_policies.py; with sockets tests/cloud_pool/jobs/test_webhooks.py
loopback as a decimal, octal, hexadecimal or short number; mapped and NAT64 literals
    tests/attacks/test_webhooks.py; IPv6 literals and names, with a receiver that listens on ::1
    tests/attacks/test_ipv6.py
webhooks over TLS to a server with another certificate
    tests/attacks/test_tls.py
a rebinding name, and redirects
    tests/cloud_pool/jobs/test_webhooks.py; a look-up that mixes public and private, and redirects inside
    tests/attacks/test_webhooks.py
oversized bodies, deep nesting
    tests/cloud_pool/http/test_gateway.py, tests/cloud_pool/http/test_listener.py, tests/cloud_pool/jobs/test_api.py
large bodies on many connections at once, and clients that announce one and stop
    tests/cloud_pool/core/test_body_memory.py
slow heads and bodies
    silence tests/cloud_pool/http/test_listener.py; a byte now and then (slowloris) tests/attacks/test_slow.py
request smuggling and other odd framing
    tests/attacks/test_framing.py
10,000 half-open connections
    tests/attacks/test_flood.py
a caller that takes all it gets of a bounded pool: connections, bodies, uploads, event streams, live sessions
    tests/attacks/test_pools.py
failing requests and disconnects amid answers, both of which could crash Triton
    tests/cloud_pool/http/test_failures.py
slow, oversized and oddly framed requests on an IPv6 listener; listening without tokens
    tests/attacks/test_ipv6.py
TLS spoken to a listener that has none (TLS ends before the gateway)
    tests/attacks/test_tls.py, tests/cloud_pool/http/test_listener.py
pages of other origins and of rebound names in a browser
    tests/attacks/test_browser.py; edge tests/edge_node/http/test_web_pages.py, gateway
    tests/cloud_pool/http/test_web_pages.py
control tokens in a caller's text
    tests/cloud_pool/http/test_gateway.py, tests/models/llama_cpp/test_injection.py
"""
