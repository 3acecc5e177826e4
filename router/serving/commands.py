"""Names of the version before on the command line and in files: commands refuse them, and rewrite files in place."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ConfigError
from ..renames import advice
from .folders import write_atomically

if TYPE_CHECKING:
    from ..migrate.rewrite import DocumentKind, Rewritten


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
    """Rewrite a file by rename if it has names of before, and keep a copy of it as `FILE.before`.

    Raises:
        ConfigError: The file cannot be read or written, or a name cannot be replaced; the file is as it was.
    """
    from ..migrate.rewrite import BEFORE, rewrite  # on demand: other commands need neither YAML nor signals

    target = path.resolve()  # the file behind a link, which stays one
    try:
        content = target.read_bytes()
        rewritten = rewrite(content.decode(), str(path), kind)
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
