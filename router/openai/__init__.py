"""OpenAI's HTTP dialect ↔ the vocabulary of `router.types`. Pure: bytes and values in, bytes and values out.

    bytes → Request           request_body (JSON, faults, shared fields), wire (the body's types), then one module per
                              kind: chat, completions, embeddings (which also encodes and decodes vectors);
                              responses/ translates `/v1/responses` to a chat and back;
                              spelling refuses names that look like one of ours, in bodies and in headers
    Request → upstream bytes  upstream/       no routing field ever
    upstream bytes → Chunks   upstream/       whole and streamed, in the dialects of many servers
    Chunks → bytes            answer          whole and streamed; error_body, model_list
    Chunks ↔ cache            cached_answer   merged chunks, stored bytes, and an answer that is delivered again

Unknown fields of a body travel in `Request.extra`; those of messages, parts, tools and calls travel with these
(`extra`). A key that appears twice in one object is refused at any depth.
"""

from .answer import AnswerEncoder
from .cached_answer import CachedAnswer, coalesce, decode_chunks, encode_chunks, is_keepable
from .chat import parse_chat
from .completions import parse_completion
from .embeddings import decode_embeddings, encode_embeddings, parse_embedding
from .error_body import encode_error, error_event, error_headers
from .model_list import ModelObject, ModelUse, encode_model, encode_models
from .request_body import check_media_type
from .responses import RESPONSE_ONLY, ResponseEcho, ResponseEncoder, parse_response
from .spelling import check_field_names, check_header_names
from .upstream import StreamDecoder, decode_answer, encode_request

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
