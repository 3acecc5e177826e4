"""`causeway-edge serve`: the daemon on this terminal, or under systemd."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import click

from ..app import App, build
from ..config.schema import Config
from ..observability.logs import start_log


def run(config: Config) -> int:
    """Until SIGTERM or Ctrl-C, then drained. Raises ConfigError where it cannot start. Returns the exit code."""
    start_log(config)

    async def live() -> None:
        await build(config).serve(on_ready=lambda app: _say(config, app))

    try:
        import uvloop
    except ImportError:  # slower, and all the same otherwise
        asyncio.run(live())
    else:
        uvloop.run(live())
    return 0


def _say(config: Config, app: App) -> None:
    """For people, and one line for programs that wait for it."""
    for line in _lines(config, app):
        click.echo(line)
    click.echo(f"ready url={_url(config, app)}" if app.port else f"ready socket={config.server.socket}")


def _lines(config: Config, app: App) -> Iterator[str]:
    report = app.parts.policies.report
    if app.port:
        yield f"listening  {_url(config, app)}/v1"
    if config.server.socket:
        yield f"socket     unix://{config.server.socket}"
    yield f"policy     {report.name}@{report.revision}  {report.file}"
    if report.last_good:
        yield f"           the file was refused, this is the last good one: {report.refused}"
    for target in app.parts.policies.active.targets:
        if target.at == "edge":
            yield f"device     {target.name}: {target.model}" + ("" if config.engine.enabled else "  (engine is off)")
    yield f"cloud      {config.cloud.url or 'none: this box answers by itself'}"


def _url(config: Config, app: App) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{app.port}"
