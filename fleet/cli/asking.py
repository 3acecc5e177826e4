"""The question before a command that cannot be undone."""

from __future__ import annotations

import sys

import click

yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


class _NobodyToAsk(click.ClickException):
    exit_code = 2


def ask(question: str, *, yes: bool) -> None:
    """Ask at the terminal; return if the answer is yes, or was given before (`--yes`).

    Raises:
        ClickException: The answer is no (exit code 1), or standard input is not a terminal (2). Nothing was changed.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        why = "there is no terminal to ask at; --yes answers the question"
        raise _NobodyToAsk(f"{question} Nothing was changed: {why}")
    try:
        agreed = click.confirm(question)
    except click.Abort as error:
        raise click.ClickException("no answer, so nothing was changed") from error
    if not agreed:
        raise click.ClickException("nothing was changed")
