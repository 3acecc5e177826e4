"""The connection of the commands to a control plane: its address, an operator's token, and its errors as messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from causeway_server.router.api.document import ErrorDocument
from causeway_server.router.serving.process import option

Answer = TypeVar("Answer")
PROGRAM = "causeway-fleet"
TOKEN_VARIABLE = "CAUSEWAY_FLEET_TOKEN"
_TIMEOUT_S = 30.0


class FleetClient:
    """A client of a control plane. Every failure is a click.ClickException that says what to do."""

    def __init__(self, url: str, token: str, ca_file: Path | None) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"{error.name} is not installed. Run: pip install 'causeway-router[fleet]'"
            ) from error

        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            timeout=_TIMEOUT_S,
            verify=str(ca_file) if ca_file else True,
        )
        self._url = url

    def get(self, path: str, kind: type[Answer], **query: str) -> Answer:
        return self._send("GET", path, kind, params={name: value for name, value in query.items() if value})

    def post(self, path: str, kind: type[Answer], body: Any = None) -> Answer:
        content = msgspec.json.encode({} if body is None else body)
        return self._send("POST", path, kind, content=content, headers={"content-type": "application/json"})

    def _send(self, method: str, path: str, kind: type[Answer], **arguments: Any) -> Answer:
        try:
            response = self._http.request(method, path, **arguments)
        except self._errors as error:
            raise click.ClickException(f"{self._url} does not answer: {error}.") from error
        try:
            if response.is_success:
                return msgspec.json.decode(response.content, type=kind)
            message = msgspec.json.decode(response.content, type=ErrorDocument).error.message
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            message = ""
        what = message or "the answer is not one of a control plane"
        raise click.ClickException(f"{self._url} answered {response.status_code}: {what}")


def connected(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a connection and the argument `client`."""

    @wraps(command)
    def run(*, url: str, token_file: Path | None, ca_file: Path | None, **rest: Any) -> Any:
        if click.get_current_context().invoked_subcommand:  # which needs no connection
            return None
        return command(client=FleetClient(url, _token(token_file), ca_file), **rest)

    file = click.Path(path_type=Path, dir_okay=False)
    for add in (
        option(
            "--ca-file",
            "PEM file of the CAs that are trusted for the control plane's certificate.",
            file,
            envvar="CAUSEWAY_FLEET_CA_FILE",
        ),
        option("--token-file", f"File with the operator's token. Default: the token in ${TOKEN_VARIABLE}.", file),
        option(
            "--url",
            "URL of the control plane. $CAUSEWAY_FLEET_URL replaces the default.",
            default="http://127.0.0.1:8090",
            envvar="CAUSEWAY_FLEET_URL",
        ),
    ):
        run = add(run)
    return run


def _token(file: Path | None) -> str:
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token:
            raise click.UsageError(f"There is no operator token. Set {TOKEN_VARIABLE} or give --token-file.")
        return token
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--token-file {file}: {error}") from error


yes_option = option("--yes", "Proceed without asking for confirmation.", is_flag=True)
