"""The encoding of answers in Redis, and of batches of chunks for other gateways.

    byte 0         format: 1 plain, 2 zlib
    bytes 1..16    BLAKE2b of key, format and the rest, keyed with the secret if there is one
    the rest       msgpack: headers, and the chunks as `router.openai.encode_chunks` writes them

The digest covers the key, so an entry that was moved to another key, truncated or written by another version is
refused. Decompression is bounded: an entry that would exceed the limit is refused, too.
"""

from __future__ import annotations

import hmac
import zlib
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from causeway_server.router.errors import StreamBroken
from causeway_server.router.openai.answer import coalesce, decode_chunks, encode_chunks, is_keepable
from causeway_server.router.types import Chunk, Request

from ..core.request_context import AnswerHead, CachedAnswer

_PLAIN, _DEFLATED = b"\x01", b"\x02"
_DIGEST_BYTES = 16
_HEAD_BYTES = 1 + _DIGEST_BYTES
_MAX_INFLATION = 8  # times max_entry_bytes: bound of an inflated entry, and of what the event loop has to deflate
_LEVEL = 1  # the fastest: the event loop waits for it


class CorruptEntry(ValueError):
    """The bytes are not an entry that a gateway wrote."""


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    headers: tuple[tuple[str, str], ...]
    chunks: bytes


class _Batch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive chunks of an answer. `first`: number of the first chunk; a batch may arrive twice."""

    first: int
    head: AnswerHead | None
    chunks: bytes


_encode = msgspec.msgpack.Encoder().encode
_body = msgspec.msgpack.Decoder(_Body).decode
_batch = msgspec.msgpack.Decoder(_Batch).decode


class EntryCodec:
    """Encodes and decodes entries. `secret` prevents other processes from forging entries."""

    def __init__(self, secret: bytes, *, compress_above_bytes: int, max_entry_bytes: int) -> None:
        self._secret = blake2b(secret).digest() if secret else b""
        self._compress_above_bytes = compress_above_bytes
        self._max_entry_bytes = max_entry_bytes

    def pack(self, key: str, head: AnswerHead, request: Request, chunks: Iterable[Chunk]) -> bytes | None:
        """Encode an entry; None for an answer that is broken, truncated, too large or uncacheable."""
        chunks = tuple(chunks)
        try:
            choices, usage = coalesce(chunks)
        except StreamBroken:
            return None
        if not is_keepable(request, choices, usage):
            return None
        body = _encode(_Body(head.headers, encode_chunks([*choices, Chunk(usage=usage)])))
        if len(body) > self._max_entry_bytes * _MAX_INFLATION:
            return None
        form = _PLAIN
        if len(body) > self._compress_above_bytes:
            form, body = _DEFLATED, zlib.compress(body, _LEVEL)
        entry = form + self._digest(key, form, body) + body
        return entry if len(entry) <= self._max_entry_bytes else None

    def unpack(self, key: str, entry: bytes, age_s: float) -> CachedAnswer:
        """Decode an entry. Raises CorruptEntry."""
        form, digest, body = entry[:1], entry[1:_HEAD_BYTES], entry[_HEAD_BYTES:]
        if not hmac.compare_digest(digest, self._digest(key, form, body)):
            raise CorruptEntry("The digest of the cache entry does not match.")
        try:
            if form == _DEFLATED:
                body = _inflated(body, self._max_entry_bytes * _MAX_INFLATION)
            content = _body(body)
            return CachedAnswer(AnswerHead(content.headers), _as_stream(decode_chunks(content.chunks)), age_s)
        except (zlib.error, msgspec.DecodeError, ValueError) as error:
            raise CorruptEntry(type(error).__name__) from None

    def _digest(self, key: str, form: bytes, body: bytes) -> bytes:
        return blake2b(key.encode() + form + body, digest_size=_DIGEST_BYTES, key=self._secret).digest()


def pack_batch(first: int, head: AnswerHead | None, chunks: Iterable[Chunk]) -> bytes:
    return _encode(_Batch(first, head, encode_chunks(chunks)))


def unpack_batch(data: bytes, have: int) -> tuple[AnswerHead | None, tuple[Chunk, ...]]:
    """Return the head and the chunks from number `have` on. Raises CorruptEntry, also if earlier chunks are missing."""
    try:
        batch = _batch(data)
        chunks = decode_chunks(batch.chunks)
    except ValueError as error:  # msgspec's errors are ValueErrors too
        raise CorruptEntry(type(error).__name__) from None
    if batch.first > have:
        raise CorruptEntry("The cache entry lacks a batch of chunks.")
    return batch.head, chunks[have - batch.first :]


def _inflated(body: bytes, limit_bytes: int) -> bytes:
    """Decompress the body. Raises zlib.error or CorruptEntry."""
    decompressor = zlib.decompressobj()
    inflated = decompressor.decompress(body, limit_bytes)
    if not decompressor.eof:
        raise CorruptEntry("The cache entry is truncated, or exceeds the maximum size.")
    return inflated


def _as_stream(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """Split each choice's chunk into its text and its end, as a stream sends them."""
    split: list[Chunk] = []
    for chunk in chunks:
        if chunk.finish_reason is None:
            split.append(chunk)
            continue
        if chunk.text or chunk.reasoning or chunk.tool_calls or chunk.logprobs or chunk.refusal is not None:
            split.append(msgspec.structs.replace(chunk, finish_reason=None, stop=""))
        split.append(Chunk(index=chunk.index, finish_reason=chunk.finish_reason, stop=chunk.stop))
    return tuple(split)
