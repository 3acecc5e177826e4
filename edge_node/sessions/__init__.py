"""Live sessions over WebSocket: `GET /v1/realtime` with OpenAI's events. The events themselves are `router.realtime`.

    sessions   the table of sessions: who may open or resume one, how long they live, drain
    live       one session: its connection, the response that is being generated, the sounds that are understood
    socket     one connection: handshake, frames, a peer that reads slowly
    reply      the answer of a response, as a `Reply` of the service

A session is in memory only, and only its client can resume it. No event of it is logged.
"""
