"""Process utilities: confirmation at the terminal, the event loop, garbage collection, ending with the parent process,
and names of the version before, which commands refuse and rewrite in files.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ..errors import ConfigError
from ..renames import advice
from .folders import write_atomically

if TYPE_CHECKING:
    from ..migrate.rewrite import DocumentKind, Rewritten

_GC_THRESHOLD = 10_000  # containers that are left between collections of the youngest generation
_PR_SET_PDEATHSIG = 1
_READS_CERTIFICATES = "set_default_verify_paths"


def begin_imports() -> None:
    """Prepare for the imports of a server: collect nothing until `tune_garbage_collector`, and have aiohttp read the
    certificates of the system when its client first needs them, whenever it is imported.

    Collections among the imports take a fifth of a start. aiohttp reads the certificates twice as it is imported, once
    for connections that verify none: 22 ms and 2.3 MB each time, for connections that most servers never open.
    """
    gc.disable()
    import ssl  # on demand: most commands need none

    create, read = ssl.create_default_context, ssl.SSLContext.set_default_verify_paths

    class LateContext(ssl.SSLContext):
        """The context of `create_default_context`, made for the first connection. aiohttp offers it HTTP/1.1 only."""

        made: ssl.SSLContext | None = None

        def wrap_bio(self, *connection: Any, **more: Any) -> ssl.SSLObject:
            if self.made is None:
                self.made = create()
                self.made.set_alpn_protocols(["http/1.1"])
            return self.made.wrap_bio(*connection, **more)

    def is_for_aiohttp() -> bool:
        caller: str = sys._getframe(2).f_globals["__name__"]  # noqa: SLF001
        return caller == "aiohttp.connector"

    def create_context(*purpose: Any, **certificates: Any) -> ssl.SSLContext:
        return LateContext(ssl.PROTOCOL_TLS_CLIENT) if is_for_aiohttp() else create(*purpose, **certificates)

    def read_certificates(context: ssl.SSLContext) -> None:
        if not is_for_aiohttp():  # it has a context that verifies none
            read(context)

    vars(ssl)["create_default_context"] = create_context
    setattr(ssl.SSLContext, _READS_CERTIFICATES, read_certificates)


def tune_garbage_collector() -> None:
    """Exclude the objects that exist after the start from collections, and collect young objects less often.

    Collecting everything that a gateway imports and builds takes 70 ms, in which all streams pause and calls with a
    short timeout, such as the shared cache's, fail. Nor is it collected once before: of a daemon's 67,000 objects 2,281
    would go, in 28 ms of its start.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)


def end_with_parent() -> None:
    """Request SIGTERM when the parent dies, even from kill -9 (Linux, prctl(2)). Call it in a child before exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any] | click.Command)


def refuse(program: str, message: str) -> NoReturn:
    """Print a usage error as one line on stderr and exit with status 2."""
    click.echo(f"{program}: {message}", err=True)
    sys.exit(2)


def ask(program: str, question: str, *, yes: bool) -> None:
    """Ask for confirmation, unless `--yes` was given, before an action that cannot be undone. Exits with status 1 for
    no, and with 2 without a terminal to ask at.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        message = f"{question} Nothing was changed: there is no terminal to ask at; --yes answers the question."
        refuse(program, message)
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        agreed = False
    if not agreed:
        click.echo(f"{program}: Nothing was changed.", err=True)
        sys.exit(1)


def run_fast(main: Coroutine[None, None, T]) -> T:
    """Run a server like asyncio.run, on uvloop if installed, which makes a streamed token a tenth cheaper. Errors that
    no other code handles are logged without their messages.
    """
    import asyncio  # imported late, so that commands without a server start faster

    from .logs import log_crashes, log_loop_errors

    async def logged() -> T:
        log_loop_errors(asyncio.get_running_loop())
        return await main

    log_crashes()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(logged())
    return uvloop.run(logged())


# --- names of the version before --------------------------------------------------------------------------------------


def option(
    name: str, meaning: str, kind: Any = None, default: Any = None, *, to: str = "", **more: Any
) -> Callable[[Command], Command]:
    """Declare an option of a command: its flags, such as ``--port`` or ``--restart/--no-restart``, and its help.
    `kind`: a type of click; None: the default's, or text; `default` is shown by the help; `to`: the parameter, if it
    has another name; `more`: further arguments of `click.option`.
    """
    shown = more.pop("show_default", default not in (None, ""))
    if default is not None:
        more["default"] = default
    return click.option(name, *([to] if to else []), help=meaning, type=kind, show_default=shown, **more)


format_option = option(
    "--format",
    "Format of the output: `human`, for people, or `json`.",
    click.Choice(["human", "json"]),
    "human",
    to="as_json",
    callback=lambda _context, _option, value: value == "json",
)
"""The option `--format human|json`; the command gets `as_json`."""


class ProgramGroup(click.Group):
    """The commands of one program, whose name the group has. Refuses old ones with what to write instead."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and (message := advice("command", f"{self.name} {args[0]}")):
            ctx.fail(message)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            path = "" if error.ctx is None else error.ctx.command_path
            below = path.removeprefix(ctx.command_path).removeprefix(self.name or "")
            if message := advice("command", f"{self.name}{below} {error.option_name}"):
                raise click.UsageError(message, error.ctx) from error
            raise


def migrate_file(path: Path, kind: DocumentKind) -> Rewritten:
    """Rewrite a file by rename if it has previous names, and keep a copy as `FILE.before`. Raises ConfigError if the
    file cannot be read or written, or a name cannot be replaced; the file is as it was.
    """
    from ..migrate.rewrite import rewrite  # on demand: other commands need neither YAML nor signals

    return rewrite_file(path, lambda text: rewrite(text, str(path), kind))


def rewrite_file(path: Path, change: Callable[[str], Rewritten]) -> Rewritten:
    """Rewrite a file by rename if `change` changes its text, and keep a copy as `FILE.before`. Raises ConfigError if
    the file cannot be read or written, or `change` raised it; the file is as it was.
    """
    from ..migrate.rewrite import BEFORE

    target = path.resolve()  # the file behind a link, which stays one
    try:
        content = target.read_bytes()
        rewritten = change(content.decode())
        if rewritten.changes:
            status = target.stat()
            for file, new in ((target.with_name(target.name + BEFORE), content), (target, rewritten.text.encode())):
                write_atomically(file, new, status.st_mode & 0o777)
                with contextlib.suppress(PermissionError):  # another account's, whose rights are not ours to give
                    os.chown(file, status.st_uid, status.st_gid)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("This file is not UTF-8 text.", where=str(path)) from error
    return rewritten
