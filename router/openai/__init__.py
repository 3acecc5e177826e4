"""OpenAI's HTTP dialect ↔ the vocabulary of `router.types`. Pure: bytes and values in, bytes and values out.

    bytes → Request          parse        faults (what a bad body gets), wire (its types), messages
    Request → upstream bytes upstream     no routing field ever
    upstream bytes → Chunks  decode       whole and streamed
    Chunks → bytes           answer       whole and streamed; frames (the two shapes), coalesce
    Chunks ↔ cache           cached       stored bytes, and an answer that is given again with a new id and time
    vectors ↔ bytes          embeddings

Unknown fields of a body travel in `Request.extra`; unknown fields inside messages, parts and tools are dropped. A key
given twice in one object is refused at any depth.
"""

from .answer import AnswerEncoder, encode_error, encode_model, encode_models, error_event
from .decode import StreamDecoder, decode_answer
from .embeddings import decode_embeddings, encode_embeddings
from .merge import coalesce
from .parse import parse_chat, parse_completion, parse_embedding
from .stored import CachedAnswer, decode_chunks, encode_chunks
from .upstream import encode_request

__all__ = [
    "AnswerEncoder",
    "CachedAnswer",
    "StreamDecoder",
    "coalesce",
    "decode_answer",
    "decode_chunks",
    "decode_embeddings",
    "encode_chunks",
    "encode_embeddings",
    "encode_error",
    "encode_model",
    "encode_models",
    "encode_request",
    "error_event",
    "parse_chat",
    "parse_completion",
    "parse_embedding",
]
