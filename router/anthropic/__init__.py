"""Anthropic's Messages API over the same requests and answers as `router.openai`.

    bytes → Request      request     `POST /v1/messages` and `/v1/messages/count_tokens`; wire has the body's types
    Chunks → bytes       encoder     a Message, or the named events that build one
    errors, models       replies     the error object, counts and lists of models

The Request is that of a chat, so routing, cache and decision records are the same. A field that we cannot honour is
refused by its name; unknown fields are refused, too. `cache_control` is accepted everywhere: prefixes are reused
without marks, and the usage tells how many tokens were.
"""
