"""Live sessions over WebSocket: `GET /v1/realtime` with OpenAI's events. The events themselves are `router.realtime`.

    sessions      the table of sessions: opening, resuming, lifetime, drain
    live_session  one session: its connection (handshake, frames, a peer that reads slowly), the response that is being
                  generated (its answer becomes events), the audio clips that are transcribed

A server implements `SessionHost` and `SessionRequests`. A session is only in memory, and only its owner can resume
it. Its events are not logged.
"""
