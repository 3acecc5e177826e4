"""One suite for every OpenAI surface: the edge answering by itself, the edge in front of the gateway, the gateway.

Each test runs against each surface on real sockets, with the repository's models in the real engine and a real Triton.
`surface` sends requests, `shapes` checks what comes back byte by byte and with the official client's own types. A test
that a surface cannot pass is named in `surface.EXCEPTIONS`, with the reason. Answers are also checked as they come from
the edge's cache and from the gateways' shared one: there each request is sent twice.

    test_chat, test_stream, test_tools, test_completions, test_embeddings, test_models   answers
    test_fields, test_bodies, test_any_body, test_http                                  refused requests
    test_client                                                                         the official client's helpers
"""
