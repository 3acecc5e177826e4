"""`python -m tests.bench.streaming.servers KIND [ARGUMENT]`: what streams are compared with.

    upstream              an OpenAI-compatible server: `max_tokens` events, one every 5 ms, or a whole answer at once
    forward UPSTREAM_URL  aiohttp's least: parses the JSON, forwards it, writes each piece that comes back
    triton                a server of Triton's gRPC protocol: `max_tokens` responses, one every 5 ms
    read ADDRESS          grpc.aio's least: reads a stream of such a server to its end, then answers in one piece

Each prints its port and serves until it is killed. All but the gRPC ones run on uvloop.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import aiohttp
import grpc
import uvloop
from aiohttp import web
from tritonclient.grpc import service_pb2

from .load import DONE, END, FIRST

EVERY_S = 0.005
PATH = "/v1/chat/completions"
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_kept: list[object] = []  # a gRPC server ends when nothing refers to it
_SERVICE = "inference.GRPCInferenceService"
_EVENT = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"assistant-large",'
    '"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
)
_USAGE = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"assistant-large",'
    '"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":%d,"total_tokens":%d}}\n\n'
)


def _chunk(events: str) -> bytes:
    return b"%x\r\n%b\r\n" % (len(events), events.encode())


def _pieces(tokens: int) -> list[bytes]:
    """What is sent at each step: the first with the head and the role, the last with the usage and the end."""
    pieces = [_chunk(_EVENT % (f'{{"content":" tok{number}"}}', "null")) for number in range(tokens)]
    pieces[0] = HEAD + _chunk(_EVENT % ('{"role":"assistant","content":""}', "null")) + pieces[0]
    last = _EVENT % ("{}", '"stop"') + _USAGE % (tokens, 20 + tokens) + "data: [DONE]\n\n"
    return [*pieces, _chunk(last) + b"0\r\n\r\n"]


_WHOLE = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"assistant-large","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":" tok0"},"logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":20,"completion_tokens":1,"total_tokens":21}}'
)


class Upstream(asyncio.Protocol):
    """Answers each POST with a stream or a whole answer, and anything else with an empty list."""

    def __init__(self) -> None:
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, found, body = self._seen.partition(b"\r\n\r\n")
        lower = head.lower()
        at = lower.find(b"content-length:")
        length = int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if not found or len(body) < length:
            return
        self._seen = b""
        asked = json.loads(body) if head.startswith(b"POST") else {}
        if asked.get("stream"):
            self._send(_pieces(asked["max_tokens"]), 0, time.monotonic())
        else:
            answer = _WHOLE if asked else b'{"object":"list","data":[]}'
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )

    def _send(self, pieces: list[bytes], number: int, started: float) -> None:
        if number:
            self._transport.write(pieces[number - 1])
        if number < len(pieces) and not self._transport.is_closing():
            due_s = started + EVERY_S * (number + 1) - time.monotonic()
            asyncio.get_running_loop().call_later(max(0.0, due_s), self._send, pieces, number + 1, started)


class Reader(asyncio.Protocol):
    """Reads a gRPC stream for each POST."""

    def __init__(self, call: Callable[[int], Awaitable[None]]) -> None:
        self._call = call
        self._running: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        tokens = json.loads(data.partition(b"\r\n\r\n")[2])["max_tokens"]
        self._running = asyncio.get_running_loop().create_task(self._read(tokens))

    async def _read(self, tokens: int) -> None:
        await self._call(tokens)
        self._transport.write(HEAD + FIRST + DONE + END)


async def upstream() -> int:
    return await _serve(Upstream)


async def read(address: str) -> int:
    channel = grpc.aio.insecure_channel(address)
    stream_infer = channel.unary_stream(
        f"/{_SERVICE}/ModelStreamInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )

    async def call(tokens: int) -> None:
        request = service_pb2.ModelInferRequest()
        request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=(1,))
        request.raw_input_contents.append(_text(json.dumps({"max_tokens": tokens})))
        async for _ in stream_infer(request):
            pass

    return await _serve(lambda: Reader(call))


async def _serve(protocol: Callable[[], asyncio.Protocol]) -> int:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    await server.start_serving()
    return int(server.sockets[0].getsockname()[1])


async def forward(url: str) -> int:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1000))

    async def handle(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        async with session.post(url + PATH, json=body) as answer:
            response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    app = web.Application()
    app.router.add_post(PATH, handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return int(runner.addresses[0][1])


async def triton() -> int:
    async def infer(requests: AsyncIterator[service_pb2.ModelInferRequest], _: object) -> AsyncIterator[bytes]:
        async for request in requests:
            tokens, started = _max_tokens(request), time.monotonic()
            for number in range(1, tokens + 1):
                await asyncio.sleep(max(0.0, started + EVERY_S * number - time.monotonic()))
                yield _response(f" tok{number - 1}", last=number == tokens)

    handler = grpc.stream_stream_rpc_method_handler(
        infer, request_deserializer=service_pb2.ModelInferRequest.FromString, response_serializer=None
    )
    server = grpc.aio.server()
    _kept.append(server)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"ModelStreamInfer": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return port


def _max_tokens(request: service_pb2.ModelInferRequest) -> int:
    at = [tensor.name for tensor in request.inputs].index("sampling_parameters")
    return int(json.loads(request.raw_input_contents[at][4:])["max_tokens"])


def _response(text: str, *, last: bool) -> bytes:
    """As Triton's vLLM backend sends it."""
    reply = service_pb2.ModelStreamInferResponse()
    tensors = {
        "text_output": _text(text),
        "finish_reason": _text("stop" if last else "None"),
        "num_output_tokens": struct.pack("<I", 1),
        "num_input_tokens": struct.pack("<I", 20),
    }
    for name, raw in tensors.items():
        reply.infer_response.outputs.add(name=name, datatype="UINT32" if name.startswith("num") else "BYTES", shape=[1])
        reply.infer_response.raw_output_contents.append(raw)
    reply.infer_response.parameters["triton_final_response"].bool_param = last
    return bytes(reply.SerializeToString())


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


KINDS: dict[str, Callable[..., Awaitable[int]]] = {
    "upstream": upstream,
    "forward": forward,
    "triton": triton,
    "read": read,
}


async def main(kind: str, *arguments: str) -> None:
    print(await KINDS[kind](*arguments), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] in ("upstream", "forward"):
        uvloop.install()
    asyncio.run(main(*sys.argv[1:]))
