"""The Causeway SDK: typed answers from a Causeway device, sync or async, over HTTP or its Unix socket.

    from causeway_sdk import Causeway

    with Causeway() as causeway:  # $CAUSEWAY_URL, else http://127.0.0.1:8080
        answer = causeway.chat("wake me up at six am")
        print(answer.text, answer.decision.route, answer.decision.reason)

        with causeway.chat("Tell me about tides", prefer="prefer_cloud", stream=True) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(stream.decision.target, stream.decision.first_token_ms)

`AsyncCauseway` has the same methods as coroutines. Closing a stream, or leaving its ``with`` block, cancels the request
on the device and in the cloud. The `Decision` of each answer names the target that answered and the reason. Every error
is a `CausewayError`.
"""

from ._async.client import AsyncCauseway, AsyncStream
from ._async.outbox import AsyncOutbox
from ._sync.client import Causeway, Stream
from ._sync.outbox import Outbox
from .answers import Answer, Choice, Chunk, Decision, Embeddings, Job, Model, ToolCall, ToolCallDelta, Usage
from .errors import (
    CausewayAPIError,
    CausewayConnectionBroken,
    CausewayError,
    CausewayTimeout,
    CausewayUnreachable,
    OutboxError,
)
from .request import Messages, Prefer, RequestOptions

__all__ = [
    "Answer",
    "AsyncCauseway",
    "AsyncOutbox",
    "AsyncStream",
    "Causeway",
    "CausewayAPIError",
    "CausewayConnectionBroken",
    "CausewayError",
    "CausewayTimeout",
    "CausewayUnreachable",
    "Choice",
    "Chunk",
    "Decision",
    "Embeddings",
    "Job",
    "Messages",
    "Model",
    "Outbox",
    "OutboxError",
    "Prefer",
    "RequestOptions",
    "Stream",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]
