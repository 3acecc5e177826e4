"""Conversions between OpenAI's HTTP dialect and the vocabulary of `router.types`. Pure: bytes and values in and out.

    bytes → Request           request_body (JSON, faults, shared fields; misspelt names of our fields and headers are
                              refused), wire (the body's types), then one module per kind: chat,
                              completions, embeddings (which also encodes and decodes vectors), audio (forms);
                              responses/ translates `/v1/responses` to a chat and back
    Request → upstream bytes  upstream/       without any routing field
    upstream bytes → Chunks   upstream/       whole and streamed, in the dialects of many servers
    Chunks → bytes            answer          whole and streamed; errors and lists of models
    Chunks ↔ cache            cached_answer   merged chunks, stored bytes, and repeated deliveries of an answer

Unknown fields of a body are kept in `Request.extra`; those of messages, parts, tools and calls in their own
`extra`. A key that appears twice in one object is refused at any depth.
"""
