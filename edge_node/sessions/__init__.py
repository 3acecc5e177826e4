"""Live sessions over WebSocket: `GET /v1/realtime` with OpenAI's events. The events themselves are `router.realtime`.

    sessions   the table of sessions: who may open or resume one, how long they live, drain
    reply      the answer of a response, as a `Reply` of the service

A session is in memory only, and only its client can resume it. No event of it is logged.
"""
