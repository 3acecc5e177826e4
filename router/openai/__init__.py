"""OpenAI's HTTP dialect ↔ the vocabulary of `router.types`. Pure: bytes and values in, bytes and values out.

    bytes → Request           request_body (JSON, faults, shared fields; names that look like one of ours, in bodies and
                              in headers, are refused), wire (the body's types), then one module per kind: chat,
                              completions, embeddings (which also encodes and decodes vectors), audio (forms);
                              responses/ translates `/v1/responses` to a chat and back
    Request → upstream bytes  upstream/       no routing field ever
    upstream bytes → Chunks   upstream/       whole and streamed, in the dialects of many servers
    Chunks → bytes            answer          whole and streamed; errors and lists of models
    Chunks ↔ cache            cached_answer   merged chunks, stored bytes, and an answer that is delivered again

Unknown fields of a body travel in `Request.extra`; those of messages, parts, tools and calls travel with
these. A key that appears twice in one object is refused at any depth.
"""
