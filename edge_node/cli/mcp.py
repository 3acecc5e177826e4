"""The command `causeway-edge mcp`: the running daemon as an MCP server (Model Context Protocol, revision 2026-07-28).

An agent's calls become requests to the daemon through the SDK, so its API keys, rates, tags and constraints hold as for
any other client. The library `mcp` speaks the protocol, over stdio or streamable HTTP.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any, Literal

import click
from pydantic import Field

from causeway_sdk import Answer, AsyncCauseway, CausewayAPIError, CausewayError, Job
from causeway_server.router.serving.process import option

from .. import daemon_version
from .options import usage_error

try:
    import uvicorn
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Context
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.transport_security import TransportSecuritySettings
    from mcp_types import CallToolResult, TextContent, ToolAnnotations
    from starlette.datastructures import Headers
except ModuleNotFoundError:  # pragma: no cover
    usage_error("MCP needs the library `mcp`: `pip install 'causeway-router[mcp]'`.")

HOST = "127.0.0.1"
KEY_VARIABLE = "CAUSEWAY_API_KEY"
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)

Prompt = Annotated[str, Field(description="The text to answer.", min_length=1)]
Model = Annotated[str, Field(description="`auto`, so that the policy decides, or the name of a target.")]
Prefer = Annotated[
    Literal["prefer_on_device", "only_on_device", "prefer_cloud", "only_cloud"] | None,
    Field(description="Narrows the policy; it never widens it."),
]
Tags = Annotated[tuple[str, ...], Field(description="Tags for the policy's rules, such as `private`.")]
MaxTokens = Annotated[int | None, Field(description="Maximum number of tokens in the answer.", ge=1)]
Key = Annotated[str, Field(description="Idempotency key: the same key is the same job. Default: a new job.")]
Webhook = Annotated[str, Field(description="URL that is notified of the job's end; the daemon limits the URLs.")]
JobId = Annotated[str, Field(description="The id of one job, to read it with its answer; empty: list the jobs.")]
Limit = Annotated[
    int, Field(description="Maximum number of jobs in the list. The newest jobs come first.", ge=1, le=100)
]


class DeviceTools:
    """The tools of one device. `url`: its address. `api_key`: the key of a caller over stdio."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        self._api_key = api_key

    async def ask(
        self,
        context: Context,
        prompt: Prompt,
        model: Model = "auto",
        prefer: Prefer = None,
        tags: Tags = (),
        max_tokens: MaxTokens = None,
    ) -> CallToolResult:
        """Answer a text on this device, or in its cloud if the policy says so. Returns the answer and its decision."""
        async with self._device(context) as device:
            answer = await device.chat(prompt, **_options(model, prefer, tags, max_tokens))
        return CallToolResult(content=[TextContent(text=answer.text)], structured_content=_answer_document(answer))

    async def route(
        self,
        context: Context,
        prompt: Prompt,
        model: Model = "auto",
        prefer: Prefer = None,
        tags: Tags = (),
        max_tokens: MaxTokens = None,
    ) -> dict[str, Any]:
        """Explain where a text would be answered, and why, without running it."""
        async with self._device(context) as device:
            return dict(await device.route(prompt, **_options(model, prefer, tags, max_tokens)))

    async def explain_decision(
        self, context: Context, decision_id: Annotated[str, Field(description="The decision's id.", min_length=1)]
    ) -> dict[str, Any]:
        """Read the record of a past answer, attempt by attempt, without its content."""
        async with self._device(context) as device:
            return dict(await device.decision(decision_id))

    async def submit_job(
        self,
        context: Context,
        prompt: Prompt,
        model: Model = "auto",
        prefer: Prefer = None,
        tags: Tags = (),
        max_tokens: MaxTokens = None,
        webhook: Webhook = "",
        key: Key = "",
    ) -> dict[str, Any]:
        """Submit a text to be answered later, also without a network. The job is on the device's disk on return."""
        async with self._device(context) as device:
            options = _options(model, prefer, tags, max_tokens)
            return _job_document(await device.submit(prompt, webhook=webhook, key=key, **options))

    async def jobs(self, context: Context, job_id: JobId = "", limit: Limit = 20) -> dict[str, Any]:
        """Read one of this client's jobs with its answer, or list them."""
        async with self._device(context) as device:
            found = [await device.job(job_id)] if job_id else await device.jobs(limit=limit)
        return {"jobs": [_job_document(job) for job in found]}

    @asynccontextmanager
    async def _device(self, context: Context) -> AsyncIterator[AsyncCauseway]:
        """Yield a client with the caller's key. Its errors become a ToolError, for the calling model to read."""
        request = context.request_context.request
        try:
            api_key = self._api_key if request is None else _bearer_key(request.headers)
            async with AsyncCauseway(self._url, api_key=api_key) as device:
                yield device
        except CausewayError as error:
            raise ToolError(_describe(error)) from error


def _bearer_key(headers: Headers) -> str:
    """Return the key of an HTTP caller, which the daemon checks; "" for none. Raise ToolError for another scheme of
    authorization, or for two keys, of which either may have tags that protect.
    """
    sent = set(headers.getlist("authorization")) or {"Bearer "}
    scheme, _, key = sent.pop().partition(" ")
    if sent or scheme.lower() != "bearer":
        raise ToolError("authorization: send exactly one `Bearer` with the API key of this device.")
    return key.strip()


def _options(model: str, prefer: Any, tags: tuple[str, ...], max_tokens: int | None) -> Any:
    given = {"model": model, "prefer": prefer, "tags": tags, "max_tokens": max_tokens}
    return {name: value for name, value in given.items() if value is not None}


def _answer_document(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": asdict(answer.usage),
        "decision": asdict(answer.decision),
    }


def _job_document(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "status": job.status,
        "attempts": job.attempts,
        "error": job.error,
        "code": job.code,
        "answer": None if job.answer is None else _answer_document(job.answer),
    }


def _describe(error: CausewayError) -> str:
    if not isinstance(error, CausewayAPIError):
        return str(error)
    later = "" if error.retry_after_s is None else f" Retry in {error.retry_after_s:g} s."
    decision = "" if error.decision is None or not error.decision.id else f" (decision {error.decision.id})"
    return f"{error.code}: {error.message}{later}{decision}"


def build_server(url: str, api_key: str) -> MCPServer[Any]:
    """Return the MCP server of the device at `url`."""
    tools = DeviceTools(url, api_key)
    server: MCPServer[Any] = MCPServer(
        "causeway-edge",
        title="Causeway edge daemon",
        version=daemon_version(),
        instructions="Answers on this device or in its cloud, as its policy decides, and says why.",
        log_level="WARNING",
    )
    for tool in (tools.route, tools.explain_decision, tools.jobs):
        server.add_tool(tool, annotations=_READS)
    server.add_tool(tools.ask, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=True))
    server.add_tool(tools.submit_job, annotations=ToolAnnotations(read_only_hint=False, destructive_hint=False))
    return server


async def serve_http(server: MCPServer[Any], port: int) -> None:
    """Serve streamable HTTP at ``/mcp`` until SIGTERM or Ctrl-C. Callers of other hosts' names are refused."""
    names = [f"{name}:{port}" for name in (HOST, "localhost")]
    settings = TransportSecuritySettings(allowed_hosts=names, allowed_origins=[f"http://{name}" for name in names])
    app = server.streamable_http_app(host=HOST, stateless_http=True, transport_security=settings)
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        usage_error(f"--port {port}: {error.strerror}. Choose another port.")
    with listener:
        click.echo(f"ready url=http://{HOST}:{port}/mcp", err=True)
        # h11 leaves the whitespace around a header's value out, which httptools keeps.
        await uvicorn.Server(uvicorn.Config(app, http="h11", log_level="warning")).serve(sockets=[listener])


@click.command("mcp")
@option("--url", "URL of the daemon, or unix:///path for a Unix socket. [$CAUSEWAY_URL]", default="")
@option(
    "--api-key",
    "API key for requests that arrive over stdio. Needed only if the daemon requires API keys. [$CAUSEWAY_API_KEY]",
    default="",
)
@option(
    "--port",
    f"Port at {HOST} for MCP over streamable HTTP, instead of over stdio. Each caller then sends its own API key.",
    click.IntRange(1, 65535),
)
def mcp(url: str, api_key: str, port: int | None) -> None:
    """Offer tools of the running daemon to agents over MCP (Model Context Protocol).

    The tools are ask, route, explain_decision, submit_job and jobs. Without --port it speaks over stdin and stdout,
    until stdin ends.
    """
    if port is None:
        asyncio.run(build_server(url, api_key).run_stdio_async())
        return
    if api_key or os.environ.get(KEY_VARIABLE):
        usage_error(f"--port: Each caller sends its own API key. Leave out --api-key and ${KEY_VARIABLE}.")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn drains, and then raises the signal again
    asyncio.run(serve_http(build_server(url, ""), port))
