"""Live sessions over WebSocket: `GET /v1/realtime` with OpenAI's events. The events themselves are `router.realtime`.

    sessions   the table of sessions: who may open or resume one, how long they live, drain
    live       one session: its connection, the response that is being generated, the sounds that are understood
    requests   these as requests of the gateway
    socket     one connection: handshake, frames, a peer that reads slowly
    delivery   the answer of a response, as events

A session lives in one gateway's memory only, and only its client can resume it there. No event of it is logged.
"""
