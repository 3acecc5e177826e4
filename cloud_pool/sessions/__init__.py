"""Live sessions over WebSocket: `GET /v1/realtime` with OpenAI's events. The events themselves are `router.realtime`.

    sessions   the table of sessions: who may open or resume one, how long they live, drain
    requests   these as requests of the gateway
    delivery   the answer of a response, as events

A session lives in one gateway's memory only, and only its client can resume it there. No event of it is logged.
"""
