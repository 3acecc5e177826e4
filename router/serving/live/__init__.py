"""Live sessions over WebSocket: `GET /v1/realtime` with OpenAI's events. The events themselves are `router.realtime`.

    live_session  one session: its connection, the response that is being generated, the sounds that are transcribed
    socket        one connection: handshake, frames, a peer that reads slowly

A session is in memory only, and only its client can resume it. No event of it is logged.
"""
