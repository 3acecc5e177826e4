"""Live sessions over WebSocket: `GET /v1/realtime` with OpenAI's events. The events themselves are `router.realtime`.

    sessions      the table of sessions: who may open or resume one, how long they live, drain
    live_session  one session: its connection (handshake, frames, a peer that reads slowly), the response that is being
                  generated (its answer becomes events), the audio clips that are transcribed

A server brings its `SessionHost` and its `SessionRequests`. A session is in memory only, and only its owner can resume
it. No event of it is logged.
"""
