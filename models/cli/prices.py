"""The command `causeway-models prices`: prices of vendors' models, from the library genai-prices, for files of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import option

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ModelPrice

_LIBRARY: Final = "genai-prices"
# The library's units of each key, the first that has a price; what they are divided by; and digits, so that amounts are
# whole numbers of 1e-12 USD.
_UNITS: Final[Mapping[str, tuple[tuple[str, ...], int, int]]] = {
    "input": (("input_mtok",), 1, 6),
    "output": (("output_mtok",), 1, 6),
    "cached_input": (("cache_read_mtok",), 1, 6),
    "per_request": (("requests_kcount",), 1000, 12),
    "audio_second": (("audio_hours", "input_audio_hours"), 3600, 12),
}


@click.command("prices")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@option("--of", "Print the prices of the named model, such as openai/gpt-4o-mini.", to="model")
def prices(files: tuple[Path, ...], model: str | None) -> None:
    """Write the current prices of models into FILES, which are policies or configuration files of gateways.

    Each `price: {of: openai/gpt-4o-mini}` gets its prices, and the version of the table, beside it. Run it again to
    follow a newer version of the library genai-prices; the previous file is kept as FILE.before.
    """
    from causeway_server.router.migrate.prices import with_prices
    from causeway_server.router.serving.process import rewrite_file

    try:
        from genai_prices.data_snapshot import get_snapshot
    except ImportError:
        raise click.ClickException(
            f"The library {_LIBRARY}, which has the prices, is not installed. Install causeway-router[prices], "
            "or write the prices yourself."
        ) from None
    table = f"{_LIBRARY} {version(_LIBRARY)}"
    find = partial(price_of, get_snapshot(), table=table, now=datetime.now(UTC))
    try:
        if model:
            keys = {"of": model, "table": table, **find(model)}
            click.echo(f"price: {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}")
        for file in files:
            change = partial(with_prices, file=str(file), table=table, find=find)
            for line in rewrite_file(file, change).report(str(file)):
                click.echo(line)
    except (ConfigError, LookupError) as error:
        raise click.ClickException(str(error.args[0]) if isinstance(error, LookupError) else str(error)) from error


def price_of(snapshot: DataSnapshot, name: str, *, table: str, now: datetime) -> Mapping[str, str]:
    """Return a model's prices by the keys of a price; where they depend on the prompt's length, the lowest.

    `table`: its name, for messages. Raises LookupError, which says what to write, if it has no price that counts here.
    """
    provider, _, model = name.partition("/")
    try:
        _, found = snapshot.find_provider_model(model, None, provider, None)
    except LookupError:
        known = [f"{one.id}/{each.id}" for one in snapshot.providers for each in one.models]
        near = "".join(f" Did you mean `{one}`?" for one in get_close_matches(name, known, n=1))
        raise LookupError(f"{table} has no model `{name}`.{near} {_BY_HAND}") from None
    prices = dict(_counted(found.get_prices(now)))
    if not prices:
        raise LookupError(f"{table} has no price of `{name}` per token, request or second of audio. {_BY_HAND}")
    return {key: f"{amount.normalize():f}" for key, amount in prices.items()}


_BY_HAND: Final = "Otherwise write `input` and `output`, in USD per million tokens, without `of` and `table`."


def _counted(price: ModelPrice) -> Iterator[tuple[str, Decimal]]:
    for key, (units, divisor, digits) in _UNITS.items():
        amounts = [amount for unit in units if (amount := getattr(price, unit)) is not None]
        for amount in amounts[:1]:
            yield key, round((amount if isinstance(amount, Decimal) else amount.base) / divisor, digits)


COMMANDS = (prices,)
