"""The connection to one Triton: a gRPC channel, replaced when nothing comes through it any more.

A firewall or NAT that forgets a connection, or a host that vanishes, leaves it open at our end. TCP notices after
minutes; pings would notice sooner, but Triton treats frequent ones as an attack (GOAWAY, too_many_pings). So the pool,
which knows when an endpoint is silent, has the connection renewed.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from anyio.abc import TaskGroup
from tritonclient.grpc import service_pb2, service_pb2_grpc

_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_GRACE_S = 3600.0  # calls on the old channel may still end, if it was the server that was silent; they have deadlines
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A restarted Triton is back in seconds; gRPC would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Limit of one connection attempt. Distant and busy servers need some tenths of a second.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # Without it a new channel to the same address would reuse the old connection.
    ("grpc.use_local_subchannel_pool", 1),
)


class TritonConnection:
    """`tasks` closes the channels that were replaced."""

    def __init__(self, address: str, tasks: TaskGroup) -> None:
        self._address = address
        self._tasks = tasks
        self._replaced: set[grpc.aio.Channel] = set()
        self._open()

    def renew(self) -> None:
        """Use a new connection for new calls; calls in progress stay on theirs."""
        replaced = self._channel
        self._open()
        self._replaced.add(replaced)
        self._tasks.start_soon(self._close_replaced, replaced)

    def stream_infer(
        self, request: service_pb2.ModelInferRequest, *, metadata: Sequence[tuple[str, str]], timeout_s: float
    ) -> grpc.aio.UnaryStreamCall:
        """Start ModelStreamInfer for one request.

        The request and the end of requests go out together. With the generated stub they are separate operations, each
        of which costs a round through gRPC: 0.1 to 0.2 ms to the first token.
        """
        return self._stream_infer(request, metadata=metadata, timeout=timeout_s)

    async def close(self) -> None:
        for channel in (self._channel, *self._replaced):
            await channel.close()

    def _open(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._stream_infer = self._channel.unary_stream(
            _STREAM_INFER,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    async def _close_replaced(self, channel: grpc.aio.Channel) -> None:
        await channel.close(_GRACE_S)
        self._replaced.discard(channel)
