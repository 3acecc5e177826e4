"""OpenAI-compatible servers: the request that is sent to one (`request`), its answer in whatever dialect (`decode`).

`wire` reads values of an answer that servers spell differently, `calls` tells its tool calls apart, and
`event_template` recognises the events of a stream that are text alone.
"""

from __future__ import annotations

from .decode import StreamDecoder, decode_answer
from .request import encode_request

__all__ = ["StreamDecoder", "decode_answer", "encode_request"]
