"""OpenAI's `POST /v1/responses`, without its storage: a thin translation of the same requests and answers.

    bytes → Request      request     input items become messages, text.format the response format
    Chunks → bytes       encoder     a Response object, or its events with sequence numbers

The Request is that of a chat, so routing, cache and decision records are the same.
"""
