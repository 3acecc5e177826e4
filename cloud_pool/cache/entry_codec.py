"""An answer as bytes in Redis, and pieces as bytes on their way to other gateways.

    byte 0         format: 1 plain, 2 zlib
    bytes 1..16    BLAKE2b of key, format and the rest, keyed with the secret if there is one
    the rest       msgpack: headers, and the chunks as `router.openai.encode_chunks` writes them

The digest covers the key, so an entry under another key, a cut one or one of another version is none. Reading is
bounded: what inflates to more than `limit_bytes` is no entry either.
"""

from __future__ import annotations

import hmac
import zlib
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from router.errors import StreamBroken
from router.openai import coalesce, decode_chunks, encode_chunks
from router.types import Chunk

from ..serving.request_context import AnswerHead, CachedAnswer

_PLAIN, _DEFLATED = b"\x01", b"\x02"
_DIGEST_BYTES = 16
_HEAD_BYTES = 1 + _DIGEST_BYTES
_INFLATES = 8  # times what is stored: the bound of what an entry may become, and of what the event loop has to deflate
_LEVEL = 1  # the event loop waits for it


class CorruptEntry(ValueError):
    """Not what we wrote."""


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    headers: tuple[tuple[str, str], ...]
    chunks: bytes


class _Batch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Some pieces of an answer. `at` is the number of the first: a batch may come twice."""

    at: int
    head: AnswerHead | None
    chunks: bytes


_encode = msgspec.msgpack.Encoder().encode
_body = msgspec.msgpack.Decoder(_Body).decode
_batch = msgspec.msgpack.Decoder(_Batch).decode


class EntryCodec:
    """`secret` makes entries that nobody without it can forge."""

    def __init__(self, secret: bytes, *, compress_above_bytes: int, max_entry_bytes: int) -> None:
        self._secret = blake2b(secret).digest() if secret else b""
        self._compress_above_bytes = compress_above_bytes
        self._max_entry_bytes = max_entry_bytes

    def pack(self, key: str, head: AnswerHead, chunks: Iterable[Chunk]) -> bytes | None:
        """The entry, or None for an answer that is not kept: broken, cut short, filtered, or too large."""
        chunks = tuple(chunks)
        if any(chunk.resume for chunk in chunks):  # cut short for want of a place
            return None
        try:
            choices, usage = coalesce(chunks)
        except StreamBroken:
            return None
        if any(choice.finish_reason == "content_filter" for choice in choices):
            return None
        body = _encode(_Body(head.headers, encode_chunks([*choices, Chunk(usage=usage)])))
        if len(body) > self._max_entry_bytes * _INFLATES:
            return None
        form = _PLAIN
        if len(body) > self._compress_above_bytes:
            form, body = _DEFLATED, zlib.compress(body, _LEVEL)
        entry = form + self._digest(key, form, body) + body
        return entry if len(entry) <= self._max_entry_bytes else None

    def unpack(self, key: str, entry: bytes, age_s: float) -> CachedAnswer:
        """Raises Corrupt."""
        form, digest, body = entry[:1], entry[1:_HEAD_BYTES], entry[_HEAD_BYTES:]
        if not hmac.compare_digest(digest, self._digest(key, form, body)):
            raise CorruptEntry("the digest is another")
        try:
            if form == _DEFLATED:
                body = _inflated(body, self._max_entry_bytes * _INFLATES)
            said = _body(body)
            return CachedAnswer(AnswerHead(said.headers), _spoken(decode_chunks(said.chunks)), age_s)
        except (zlib.error, msgspec.DecodeError, ValueError) as error:
            raise CorruptEntry(type(error).__name__) from None

    def _digest(self, key: str, form: bytes, body: bytes) -> bytes:
        return blake2b(key.encode() + form + body, digest_size=_DIGEST_BYTES, key=self._secret).digest()


def pack_pieces(at: int, head: AnswerHead | None, chunks: Iterable[Chunk]) -> bytes:
    return _encode(_Batch(at, head, encode_chunks(chunks)))


def unpack_pieces(data: bytes, have: int) -> tuple[AnswerHead | None, tuple[Chunk, ...]]:
    """The head, and the chunks from number `have` on. Raises Corrupt, also where some are missing before them."""
    try:
        said = _batch(data)
        chunks = decode_chunks(said.chunks)
    except ValueError as error:  # msgspec's own among them
        raise CorruptEntry(type(error).__name__) from None
    if said.at > have:
        raise CorruptEntry("a batch is missing")
    return said.head, chunks[have - said.at :]


def _inflated(body: bytes, limit_bytes: int) -> bytes:
    """Raises zlib.error or Corrupt."""
    inflating = zlib.decompressobj()
    found = inflating.decompress(body, limit_bytes)
    if not inflating.eof:
        raise CorruptEntry("cut, or larger than an entry can be")
    return found


def _spoken(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """As a stream says it: each choice's text, and then its end."""
    found: list[Chunk] = []
    for chunk in chunks:
        if chunk.finish_reason is None:
            found.append(chunk)
            continue
        if chunk.text or chunk.tool_calls or chunk.logprobs or chunk.refusal is not None:
            found.append(msgspec.structs.replace(chunk, finish_reason=None))
        found.append(Chunk(index=chunk.index, finish_reason=chunk.finish_reason))
    return tuple(found)
