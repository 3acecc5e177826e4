"""OpenAI's Realtime events, text: frames of a session ↔ the vocabulary of `router.types`. Pure: no sockets, no clocks.

    frame → Request      session        one client event: settings, conversation, or a response to start or cancel
                         wire           the events' types
                         conversation   the items, bounded; they become the messages of a request
    Chunks → events      response       the events that build one response
    events → frames      event_log      numbered, kept until they are sent, and for a while after it: a cut connection
                                        resumes by the number of the last event that it received

The request is made by `router.openai.responses`, as for `POST /v1/responses`, so routing, cache and decision records
are the same. Edge and gateway have sockets of their own; the events, the bounds and the close codes are these.
"""

from .close_codes import CloseCode
from .event_log import EventLog, EventsLost, encode_refusal
from .response import ResponseStream
from .session import CancelResponse, RealtimeSession, SessionLimits, StartResponse

__all__ = [
    "CancelResponse",
    "CloseCode",
    "EventLog",
    "EventsLost",
    "RealtimeSession",
    "ResponseStream",
    "SessionLimits",
    "StartResponse",
    "encode_refusal",
]
