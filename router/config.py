"""What the configurations of device and gateway share: limits of numbers, sections that both have, keys of a struct."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, get_type_hints

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]


class SessionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `realtime`: live sessions over WebSocket."""

    # maximum of live sessions, of one client at most half; beyond: 429, unless a cut one gives way. Keep it below
    # `server.max_connections`
    max_sessions: Positive = 256
    # maximum items of a session's conversation; the oldest ones give way
    max_items: Annotated[int, Meta(ge=2)] = 256
    # maximum size of a session's conversation; a client's event may have twice as much
    max_bytes: Annotated[int, Meta(ge=4096)] = 256 * 1024
    replay_bytes: Count = 256 * 1024  # sent events that are kept for a connection that is cut
    # maximum length of the audio clips of a session's conversation together, and of the one that is being sent; the
    # oldest items give way. A second takes 64 kB
    max_audio_s: Seconds = 30.0
    # how long a session whose connection was cut can be resumed; its running answer goes on so long; 0: it ends at once
    resume_s: Pause = 30.0
    idle_s: Seconds = 900.0  # a session without an event of its client and without an answer ends after this time
    # time between two pings; a client that answers none within half of it is gone
    ping_s: Annotated[float, Meta(ge=1)] = 20.0


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `tracing`."""

    endpoint: str = ""  # OpenTelemetry collector (OTLP over HTTP), such as `http://host:4318`; empty: no traces
    # share of requests without an incoming trace context that are traced, 0 to 1
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0


@functools.cache
def leaves_of(struct: type[msgspec.Struct]) -> Mapping[str, object]:
    """Return every dotted key of `struct` and its type with its limits. A nested struct is a section, not a key."""
    found: dict[str, object] = {}
    for name, annotation in get_type_hints(struct, include_extras=True).items():
        if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
            found |= {f"{name}.{key}": leaf for key, leaf in leaves_of(annotation).items()}
        else:
            found[name] = annotation
    return found
