"""The command `causeway-edge serve`: run the daemon on a terminal or under systemd."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from causeway_server.router.serving.addresses import url_of
from causeway_server.router.serving.logs import start_log
from causeway_server.router.serving.process import run_fast

from ..app import App, build
from ..config.schema import Config

if TYPE_CHECKING:
    from ..agent.interfaces import FleetLink


def run(config: Config, fleet: FleetLink | None = None) -> int:
    """Run the daemon until SIGTERM or Ctrl-C, drain it, and return the exit code; 1 if a background task failed.

    To activate a bundle with other settings, the program is executed again in the same process after the drain. Without
    `fleet` it follows the one that the device joined. Raises ConfigError if the daemon cannot start.
    """
    start_log(config.log, config.log_format)
    os.umask(0o077)  # its files, including those beside databases, are for its own account alone

    async def run_daemon() -> App:
        app = build(config, fleet=fleet)
        start_log(app.config.log, app.config.log_format)  # a bundle may set the level
        await app.serve(
            on_listening=lambda app: _print_summary(app.config, app), on_ready=lambda app: _print_ready(app.config, app)
        )
        return app

    app = run_fast(run_daemon())
    if app.failed:
        return 1
    if app.restarting:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return 0


def _print_summary(config: Config, app: App) -> None:
    """Print the addresses and targets of the daemon, and in red its problems."""
    for line in _summary(config, app):
        click.echo(line)
    readiness = app.parts.readiness()
    for problem in readiness.problems:
        click.secho(f"problem    {problem}", fg="red")
    if not app.parts.can_answer():
        click.echo(f"waiting    no target can answer yet: {', '.join(readiness.waiting_for)}")


def _print_ready(config: Config, app: App) -> None:
    click.echo(f"ready url={_url(config, app)}" if app.port else f"ready socket={config.server.socket}")


def _summary(config: Config, app: App) -> Iterator[str]:
    report = app.parts.policies.report
    if app.port:
        yield f"listening  {_url(config, app)}/v1"
    if config.server.socket:
        yield f"socket     unix://{config.server.socket}"
    yield f"policy     {report.name}@{report.revision}  {report.file}"
    if report.last_good:
        yield f"           the file was rejected, so the last good policy is active: {report.refused}"
    for target in app.parts.policies.active.targets:
        if target.at == "edge":
            yield f"device     {target.name}: {target.served}" + ("" if config.engine.enabled else "  (engine is off)")
    for cloud in config.cloud_configs:
        yield f"cloud      {cloud.name}: {cloud.url}"
    if not config.clouds:
        yield "cloud      none: this device answers on its own"


def _url(config: Config, app: App) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)
    return url_of(host, app.port or 0, tls=bool(config.server.tls.cert_file))
