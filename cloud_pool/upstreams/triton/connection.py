"""The connection to one Triton: a gRPC channel, and another one when nothing comes through it any more.

A firewall or a NAT that forgets a connection, and a host that vanishes, leave it open at our end. TCP finds out after
minutes, and pings would find out sooner but Triton takes frequent ones for an attack (GOAWAY, too_many_pings). So the
pool, which knows that an endpoint is silent, has it renewed.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from anyio.abc import TaskGroup
from tritonclient.grpc import service_pb2, service_pb2_grpc

_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_GRACE_S = 60.0  # calls on the old channel may yet end, if it was the server that was silent
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A restarted Triton is back in seconds; gRPC would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt to connect may take. Far and busy servers need some tenths of a second.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # Else a new channel to an address is the old connection.
    ("grpc.use_local_subchannel_pool", 1),
)


class Connection:
    """`tasks` closes what was replaced."""

    def __init__(self, address: str, tasks: TaskGroup) -> None:
        self._address = address
        self._tasks = tasks
        self._old: set[grpc.aio.Channel] = set()
        self._open()

    def renew(self) -> None:
        """New calls go over a new connection; running ones stay where they are."""
        old = self._channel
        self._open()
        self._old.add(old)
        self._tasks.start_soon(self._let_go, old)

    def stream_infer(
        self, request: service_pb2.ModelInferRequest, *, metadata: Sequence[tuple[str, str]], timeout_s: float
    ) -> grpc.aio.UnaryStreamCall:
        """ModelStreamInfer of one request. On the wire the end of the requests comes with it; said by itself, as by the
        generated stub, it and the beginning would each cost a round through gRPC: 0.1 to 0.2 ms to the first token.
        """
        return self._stream_infer(request, metadata=metadata, timeout=timeout_s)

    async def close(self) -> None:
        for channel in (self._channel, *self._old):
            await channel.close()

    def _open(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._stream_infer = self._channel.unary_stream(
            _STREAM_INFER,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    async def _let_go(self, channel: grpc.aio.Channel) -> None:
        await channel.close(_GRACE_S)
        self._old.discard(channel)
