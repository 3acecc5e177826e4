"""OpenAI's HTTP dialect ↔ the vocabulary of `router.types`. Pure: bytes and values in, bytes and values out.

    bytes → Request           request_body (JSON, faults, shared fields; names that look like one of ours, in bodies and
                              in headers, are refused), wire (the body's types), then one module per kind: chat,
                              completions, embeddings (which also encodes and decodes vectors), audio (forms);
                              responses/ translates `/v1/responses` to a chat and back
    Request → upstream bytes  upstream/       no routing field ever
    upstream bytes → Chunks   upstream/       whole and streamed, in the dialects of many servers
    Chunks → bytes            answer          whole and streamed; errors and lists of models
    Chunks ↔ cache            cached_answer   merged chunks, stored bytes, and an answer that is delivered again

Unknown fields of a body travel in `Request.extra`; those of messages, parts, tools and calls travel with
these. A key that appears twice in one object is refused at any depth.
"""

from .answer import (
    AnswerEncoder,
    ModelObject,
    ModelUse,
    encode_error,
    encode_model,
    encode_models,
    error_event,
    error_headers,
)
from .cached_answer import CachedAnswer, coalesce, decode_chunks, encode_chunks, is_keepable
from .chat import parse_chat
from .completions import parse_completion
from .embeddings import decode_embeddings, encode_embeddings, parse_embedding
from .request_body import check_field_names, check_header_names, check_media_type
from .responses.encoder import ResponseEncoder
from .responses.request import RESPONSE_ONLY, ResponseEcho, parse_response
from .upstream.decode import StreamDecoder, decode_answer
from .upstream.request import encode_request

__all__ = [
    "RESPONSE_ONLY",
    "AnswerEncoder",
    "CachedAnswer",
    "ModelObject",
    "ModelUse",
    "ResponseEcho",
    "ResponseEncoder",
    "StreamDecoder",
    "check_field_names",
    "check_header_names",
    "check_media_type",
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
    "error_headers",
    "is_keepable",
    "parse_chat",
    "parse_completion",
    "parse_embedding",
    "parse_response",
]
