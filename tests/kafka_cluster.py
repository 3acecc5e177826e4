"""A broker of Kafka's protocol in a process of its own: librdkafka's mock cluster behind a relay.

    python -m tests.kafka_cluster [CERT KEY CA]    # prints its port; then reads commands: `topic NAME PARTITIONS`,
                                                   # `down`, `up`, `full`, `room`

With a certificate it speaks TLS alone, and asks for client certificates of the CA.

No Kafka server is in the distribution's packages. The mock speaks Kafka's protocol on real sockets, with groups,
commits and transactions; its data live as long as the process. Clients reach it through a relay, which makes up for
some of what the mock has otherwise than a server:

1. A marker of a transaction's end has the CRC 0: it gets the right one. Messages are not touched.
2. A fetch that finds nothing is answered at the end of its wait, also if a message comes meanwhile: the wait is short.
3. A producer goes on although a newer one has its transactional id: its next transaction, and the end of one that is
   under way, carry a wrong epoch, for which the mock refuses them.

4. The offset of a time is the beginning of the partition: the mock knows no times.
5. A group's leader says who gets what after all others have asked: the mock refuses those that ask later.

`down` is what clients see of a broker that was killed: connections break, also between a request and its answer, and
nothing listens. `full` is what they see of one whose disk is full: it stores nothing (KAFKA_STORAGE_ERROR). What the
mock does not have: isolation (readers see what a transaction has written before it ends, and what it aborts).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import re
import ssl
import struct
import sys
from pathlib import Path

import confluent_kafka
from aiokafka.record.util import calc_crc32c

FETCH_WAIT_MS = 20
REBALANCE_DELAY_MS = 50  # of a new group
_PRODUCER = 0
_BROKER = 1
_PRODUCE, _STORAGE_ERROR, _ERRORS = 0, 56, 10_000
_FETCH, _LIST_OFFSETS, _SYNC_GROUP, _INIT_PRODUCER, _ADD_PARTITIONS, _END_TRANSACTION = 1, 2, 14, 22, 24, 26
_EARLIEST = -2
_SYNC_S = 1.0
_READ_S = 0.02  # until the mock has read what the others asked
# A batch of one record: length, leader epoch, magic; CRC 0; from the flags (transactional, control) to the end.
_MARKER = re.compile(rb"(\x00\x00\x00\x42.{4}\x02)\x00{4}(\x00\x30\x00{4}.{51})", re.DOTALL)


class MockCluster:
    """librdkafka's mock cluster of one broker (rdkafka_mock.h)."""

    def __init__(self) -> None:
        self._library = _library()
        conf, fault = self._library.rd_kafka_conf_new(), ctypes.create_string_buffer(512)
        client = self._library.rd_kafka_new(_PRODUCER, ctypes.c_void_p(conf), fault, ctypes.c_size_t(512))
        assert client, fault.value.decode()
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(ctypes.c_void_p(client), 1))
        bootstraps = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster)
        self.port = int(bootstraps.decode().rpartition(":")[2])
        self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, REBALANCE_DELAY_MS)

    def advertise(self, port: int) -> None:
        """Tell clients this port."""
        self._library.rd_kafka_mock_broker_set_host_port(self._cluster, _BROKER, b"127.0.0.1", port)

    def create_topic(self, name: str, partitions: int) -> None:
        fault = self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)
        assert fault == 0, f"error {fault}"

    def set_full(self, full: bool) -> None:
        """Answer what is produced with an error, or store it again."""
        cluster, kind = self._cluster, ctypes.c_int16(_PRODUCE)
        self._library.rd_kafka_mock_clear_request_errors(cluster, kind)
        if full:
            errors = (ctypes.c_int * _ERRORS)(*[_STORAGE_ERROR] * _ERRORS)
            self._library.rd_kafka_mock_push_request_errors_array(cluster, kind, ctypes.c_size_t(_ERRORS), errors)


def _library() -> ctypes.CDLL:
    """Return the library that confluent_kafka brings, or the system's."""
    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    library = ctypes.CDLL(next((str(path) for path in folder.glob("librdkafka*.so*")), "librdkafka.so.1"))
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    return library


class Relay:
    """Passes requests and responses on, whole ones at a time."""

    def __init__(self, mock_port: int, tls: ssl.SSLContext | None) -> None:
        self._mock_port = mock_port
        self._tls = tls
        self._port = 0
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._asking = asyncio.Condition()
        self._asked = collections.defaultdict[tuple[bytes, int], set[bytes]](set)  # members, by group and generation
        self._producers: dict[bytes, int] = {}  # the newest one's id, by transactional id

    async def up(self) -> int:
        """Listen, under the same port as before. Returns the port."""
        if self._listener is None:
            self._listener = await asyncio.start_server(self._connect, "127.0.0.1", self._port, ssl=self._tls)
            self._port = self._listener.sockets[0].getsockname()[1]
        return self._port

    def down(self) -> None:
        """Break every connection, and listen no more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mock_reader, mock_writer = await asyncio.open_connection("127.0.0.1", self._mock_port)
        ends = {writer, mock_writer}
        self._writers |= ends
        initialised: dict[int, bytes] = {}  # transactional ids whose producer's id is in the answer, by request
        passing = {
            asyncio.ensure_future(self._requests(reader, mock_writer, initialised)),
            asyncio.ensure_future(self._responses(mock_reader, writer, initialised)),
        }
        if self._listener is not None:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
        for end in ends:
            end.transport.abort()
        self._writers -= ends

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, initialised: dict[int, bytes]
    ) -> None:
        while True:
            frame = bytearray(await _frame(reader))
            kind, version, number, name_length = struct.unpack_from(">hhih", frame, 4)
            body = 14 + max(0, name_length)
            if kind == _FETCH:
                struct.pack_into(">i", frame, body + 4, FETCH_WAIT_MS)  # (2)
            elif kind == _LIST_OFFSETS:
                _without_times(frame, body + (4 if version < 2 else 5))  # (4)
            elif kind == _SYNC_GROUP:
                await self._wait_for_members(frame, body, version)  # (5)
            elif kind in (_INIT_PRODUCER, _ADD_PARTITIONS, _END_TRANSACTION):
                transactional_id, end = _text(frame, body)
                if kind == _INIT_PRODUCER:
                    initialised[number] = transactional_id
                else:
                    self._refuse_old(frame, end, transactional_id)
            writer.write(frame)

    async def _wait_for_members(self, frame: bytearray, at: int, version: int) -> None:
        group, at = _text(frame, at)
        (generation,) = struct.unpack_from(">i", frame, at)
        member, at = _text(frame, at + 4)
        if version >= 3:
            _instance, at = _text(frame, at)
        (count,) = struct.unpack_from(">i", frame, at)
        asked = self._asked[group, generation]
        async with self._asking:
            asked.add(member)
            self._asking.notify_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asking.wait_for(lambda: len(asked) >= count), _SYNC_S)
        if count > 1:
            await asyncio.sleep(_READ_S)

    def _refuse_old(self, frame: bytearray, at: int, transactional_id: bytes) -> None:
        """(3)"""
        producer, epoch = struct.unpack_from(">qh", frame, at)
        if self._producers.get(transactional_id, producer) != producer:
            struct.pack_into(">h", frame, at + 8, epoch + 1)

    async def _responses(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, initialised: dict[int, bytes]
    ) -> None:
        while True:
            frame = await _frame(reader)
            (number,) = struct.unpack_from(">i", frame, 4)
            if (transactional_id := initialised.pop(number, None)) is not None:
                _throttle, fault, producer = struct.unpack_from(">ihq", frame, 8)
                if fault == 0:
                    self._producers[transactional_id] = producer
            writer.write(with_checksums(frame))


def _text(frame: bytes | bytearray, at: int) -> tuple[bytes, int]:
    """Return a text and where it ends."""
    (length,) = struct.unpack_from(">h", frame, at)
    end = at + 2 + max(0, length)
    return bytes(frame[at + 2 : end]), end


def _without_times(frame: bytearray, at: int) -> None:
    """Ask for beginnings instead of times; `at`: the topics."""
    (topics,) = struct.unpack_from(">i", frame, at)
    at += 4
    for _ in range(topics):
        _name, at = _text(frame, at)
        (partitions,) = struct.unpack_from(">i", frame, at)
        at += 4
        for _ in range(partitions):
            (time_ms,) = struct.unpack_from(">q", frame, at + 4)
            if time_ms >= 0:
                struct.pack_into(">q", frame, at + 4, _EARLIEST)
            at += 12


async def _frame(reader: asyncio.StreamReader) -> bytes:
    size = await reader.readexactly(4)
    return size + await reader.readexactly(int.from_bytes(size, "big"))


def with_checksums(frame: bytes) -> bytes:
    """(1)"""
    return _MARKER.sub(lambda found: found[1] + struct.pack(">I", calc_crc32c(found[2])) + found[2], frame)


def _tls(cert: str, key: str, ca: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
    context.load_cert_chain(cert, key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def _main(*files: str) -> None:
    cluster = MockCluster()
    relay = Relay(cluster.port, _tls(*files) if files else None)
    port = await relay.up()
    cluster.advertise(port)
    print(port, flush=True)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := (await commands.readline()).decode().split():
        match line:
            case ["topic", name, partitions]:
                cluster.create_topic(name, int(partitions))
            case ["down"]:
                relay.down()
            case ["up"]:
                await relay.up()
            case ["full" | "room" as state]:
                cluster.set_full(state == "full")
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
