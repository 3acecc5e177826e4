"""Finds a decoded prefix of a prompt: in a running slot, in a prefix saved in memory, or in a file.

A source must have the same adapter, because keys and values depend on the adapter.

A file holds the tokens of a system prompt and llama.cpp's state of their cells, and nothing that a user wrote: an
engine that restarts loads it instead of decoding the prompt again. It belongs to one version of the weights and of
llama.cpp, is encrypted in pieces, which are authentic before llama.cpp sees them, and appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.router.errors import RecordUnreadable
from causeway_server.router.serving.at_rest.sealing import Sealer, sealed_bytes

from ..native import bindings
from ..native.vocabulary import Tokens
from .kv_cache import BLOCK, KVCache, PrefixCache, SavedPrefix, SequenceSlot, allocate_pages, common_prefix, copy_state
from .sequence import Sequence

log = logging.getLogger(__name__)
_MAGIC = b"causeway prompt 2\n"
_KEY_ID = "prompt"
_PIECE_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_HEADER_BYTES = 4096
_SUFFIX, _DRAFT = ".prompt", ".draft"
MIN_TOKENS = 64  # a shorter prompt is decoded as fast as a file is read


class _Header(msgspec.Struct, frozen=True):
    identity: str  # identity of the weights and of llama.cpp
    tokens: int
    state_bytes: int

    @property
    def pieces(self) -> list[int]:
        """The sizes of the encrypted pieces: the tokens, and the state."""
        whole, rest = divmod(self.state_bytes, _PIECE_BYTES)
        return [4 * self.tokens, *[_PIECE_BYTES] * whole, *[rest] * bool(rest)]


class StoredPrompt(msgspec.Struct, frozen=True, eq=False):
    """A file with a stored prompt, and the tokens in it."""

    path: Path
    tokens: Tokens
    bytes: int


class PromptStore:
    """At most `limit_bytes` of files in `folder`, least recently used removed first. For one thread, except `flush`.

    Files are written by a thread of its own; if the disk fails, only the next start takes longer.
    """

    def __init__(self, folder: Path, limit_bytes: int, identity: str, key: bytes) -> None:
        """Read the folder: remove files of other weights; leave and log those that are not stored prompts.

        `identity`: the weights, and the version of llama.cpp. `key` encrypts the files, 32 bytes.
        """
        self._key = key
        self._sealer = Sealer({_KEY_ID: key})
        self._folder = folder
        self._limit = limit_bytes
        self._identity = identity
        self._files: OrderedDict[str, StoredPrompt] = OrderedDict()  # by name, least recently used first
        self._writer = ThreadPoolExecutor(1, "prompt store")
        self._scan()

    def __len__(self) -> int:
        return len(self._files)

    def find(self, prompt: Tokens) -> StoredPrompt | None:
        """Return the longest stored prompt that `prompt` begins with."""
        fitting = (
            stored for stored in self._files.values() if common_prefix(prompt, stored.tokens) == len(stored.tokens)
        )
        return max(fitting, key=lambda stored: len(stored.tokens), default=None)

    def load(self, stored: StoredPrompt) -> NDArray[np.uint8] | None:
        """Read the state of a stored prompt; return None and forget the prompt if the file has changed."""
        try:
            with stored.path.open("rb") as file:
                header = _read_header(file)
                state = allocate_pages(header.state_bytes)
                if state is None:
                    return None
                pieces, at = self._open(file, stored.path, header), 0
                if next(pieces) != stored.tokens.tobytes():
                    raise ValueError("the file has other tokens than before")
                for piece in pieces:
                    state[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                    at += len(piece)
            os.utime(stored.path)
        except (OSError, ValueError, RecordUnreadable) as error:
            log.warning("The stored system prompt %s is not used: %s.", stored.path, error)
            self.forget(stored)
            return None
        self._files.move_to_end(stored.path.name)
        return state

    def forget(self, stored: StoredPrompt) -> None:
        if self._files.pop(stored.path.name, None) is not None:
            self._writer.submit(_try, lambda: stored.path.unlink(missing_ok=True))

    def wants(self, tokens: Tokens) -> bool:
        """Return whether the prompt is worth a file and has none yet."""
        return len(tokens) >= MIN_TOKENS and self._name(tokens) not in self._files

    def save(self, tokens: Tokens, state: NDArray[np.uint8]) -> None:
        """Write a prompt's state, in the background."""
        raw = tokens.tobytes()
        size = len(raw) + len(state)
        if size > self._limit:
            return
        stored = StoredPrompt(self._folder / self._name(tokens), tokens.copy(), size)
        self._files[stored.path.name] = stored
        self._writer.submit(_try, lambda: self._write(stored.path, raw, state))
        self._evict()

    def flush(self) -> None:
        """Wait until everything is written. Any thread."""
        self._writer.submit(lambda: None).result()  # behind all the others

    def _scan(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            paths = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime)
        except OSError as error:
            log.warning("System prompts are not stored: %s.", error)
            self._limit = 0
            return
        for path in paths:
            if path.suffix == _DRAFT:
                path.unlink(missing_ok=True)
                continue
            try:
                with path.open("rb") as file:
                    header = _read_header(file)
                    if header.identity != self._identity:
                        raise RecordUnreadable("The file belongs to other weights or to another version of llama.cpp.")
                    tokens = np.frombuffer(next(self._open(file, path, header)), np.int32)
            except (OSError, ValueError) as error:
                log.warning("The file %s is not a stored system prompt: %s.", path, error)
            except RecordUnreadable as error:  # also that of another key
                log.warning("%s is removed: %s", path, error)
                path.unlink(missing_ok=True)
            else:
                self._files[path.name] = StoredPrompt(path, tokens, tokens.nbytes + header.state_bytes)
        self._evict()

    def _open(self, file: BinaryIO, path: Path, header: _Header) -> Iterator[bytes]:
        """Yield the tokens and the pieces of the state of a file. Raises RecordUnreadable."""
        for number, size in enumerate(header.pieces):
            sealed = file.read(size + sealed_bytes(_KEY_ID))
            yield self._sealer.open(sealed, path.name, self._identity, str(number))

    def _name(self, tokens: Tokens) -> str:
        return hashlib.blake2b(tokens.tobytes(), key=self._key, digest_size=16).hexdigest() + _SUFFIX

    def _evict(self) -> None:
        while sum(stored.bytes for stored in self._files.values()) > self._limit:
            self.forget(next(iter(self._files.values())))

    def _write(self, path: Path, tokens: bytes, state: NDArray[np.uint8]) -> None:
        content = _Header(self._identity, len(tokens) // 4, len(state))
        header, at = msgspec.json.encode(content), 0
        draft = path.with_suffix(_DRAFT)
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_MAGIC + _LENGTH.pack(len(header)) + header)
                file.write(self._sealer.seal(_KEY_ID, tokens, path.name, self._identity, "0"))
                for number, size in enumerate(content.pieces[1:], 1):
                    piece = state[at : at + size].tobytes()
                    file.write(self._sealer.seal(_KEY_ID, piece, path.name, self._identity, str(number)))
                    at += size
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


def _try(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        log.warning("A system prompt is not stored: %s.", error)
    except Exception as error:
        log.error("A system prompt is not stored, because of an unexpected fault: %s.", type(error).__name__)


def _read_header(file: BinaryIO) -> _Header:
    """Return the content of a file of prefixes. Raises ValueError if it is not one."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("the header of the file is missing")
    raw = file.read(_LENGTH.size)
    length = _LENGTH.unpack(raw)[0] if len(raw) == _LENGTH.size else 0
    if not 0 < length <= _HEADER_BYTES:
        raise ValueError("the header of the file is damaged")
    header = msgspec.json.decode(file.read(length), type=_Header)  # a DecodeError is a ValueError
    size = os.fstat(file.fileno()).st_size
    if header.tokens <= 0 or header.state_bytes <= 0:
        raise ValueError("the header of the file is damaged")
    if file.tell() + sum(header.pieces) + len(header.pieces) * sealed_bytes(_KEY_ID) != size:
        raise ValueError("the size of the file is not the one in its header")
    return header


class PrefixSource(msgspec.Struct, frozen=True):
    """The source of the first `tokens` of a prompt: a running slot, or a saved prefix."""

    tokens: int = 0
    slot: SequenceSlot | None = None
    saved: SavedPrefix | None = None


class PromptPrefixes:
    """Finds prefixes for sequences that start, and saves the prefixes of sequences that end.

    `cache` is None if this model cannot share prefixes; `store`: of system prompts as files.
    """

    def __init__(
        self, context: bindings.Pointer, kv_cache: KVCache, cache: PrefixCache | None, store: PromptStore | None
    ) -> None:
        self._context = context
        self._kv_cache = kv_cache
        self._cache = cache
        self._store = store

    def find(self, sequence: Sequence, running: Iterable[Sequence]) -> PrefixSource:
        """Find a sequence's longest prefix in memory, in a file or in `running` ones (of its adapter); not its last
        token, which is decoded for its logits.
        """
        if self._cache is None:
            return PrefixSource()
        adapter = sequence.job.adapter
        tokens, limit = sequence.pending_tokens, len(sequence.pending_tokens) - 1
        saved, saved_tokens = self._cache.find(tokens, adapter)
        if self._store is not None and saved_tokens < sequence.system_tokens:
            self._load(tokens, saved_tokens, self._store, self._cache)
            saved, saved_tokens = self._cache.find(tokens, adapter)
        best = PrefixSource(sequence.places.cut(min(saved_tokens, limit)), saved=saved)
        for other in running:
            slot = slot_of(other)
            common = sequence.places.cut(min(common_prefix(other.pending_tokens, tokens), slot.length, limit))
            if common >= max(best.tokens, BLOCK):
                best = PrefixSource(common, slot=slot)
        return best

    def in_prefill(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> int:
        """Return how many of its first tokens one of these sequences, which have the same adapter, is prefilling."""
        if self._cache is None:
            return 0
        common = (common_prefix(other.pending_tokens, sequence.pending_tokens) for other in prefilling)
        return min(max(common, default=0), len(sequence.pending_tokens) - 1)

    def restore(self, source: PrefixSource, slot: SequenceSlot, position: int) -> int:
        """Restore a saved prefix, up to `position`, into a new slot; return its tokens (a running slot has them)."""
        if source.saved is None or self._cache is None:
            return source.tokens
        return self._cache.restore(source.saved, slot, source.tokens, position)

    def keep(self, sequence: Sequence) -> None:
        """Save the cells of a sequence that ends: in memory, and its system prompt as a file."""
        slot = slot_of(sequence)
        if self._cache is not None:
            self._cache.save(slot, sequence.tokens_in_slot(), sequence.job.adapter)
        prompt = sequence.prompt[: sequence.system_tokens]
        if self._store is None or slot.length < len(prompt) or not self._store.wants(prompt):
            return
        self._kv_cache.remove_from(slot, len(prompt))  # its other cells are of no more use
        if (state := copy_state(self._context, slot)) is not None:
            self._store.save(prompt, state)

    def _load(self, tokens: Tokens, better_than: int, store: PromptStore, cache: PrefixCache) -> None:
        """Load a stored prompt into the cache, if it is longer than the prefix that is found there."""
        stored = store.find(tokens)
        if stored is None or len(stored.tokens) <= better_than:
            return
        state = store.load(stored)
        if state is not None and not cache.insert(stored.tokens, state):
            store.forget(stored)


def slot_of(sequence: Sequence) -> SequenceSlot:
    assert sequence.slot is not None
    return sequence.slot
