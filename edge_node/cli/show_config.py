"""`causeway-edge config`: what would be in force, and what keys there are. Secrets are not shown."""

from __future__ import annotations

import click
import msgspec
import yaml

from ..config.schema import MEANING, Config, config_keys, config_variable


def print_keys() -> None:
    """Every key with its variable and what it is for."""
    for key in config_keys():
        click.echo(f"{key:29} {config_variable(key):43} {MEANING[key]}")


def print_config(config: Config) -> None:
    """As a file that `--config` would take."""
    cloud = msgspec.structs.replace(config.cloud, api_key="" if config.cloud.api_key_file else _hidden(config))
    document = msgspec.to_builtins(msgspec.structs.replace(config, cloud=cloud))
    click.echo(yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120), nl=False)


def _hidden(config: Config) -> str:
    return "(set)" if config.cloud.api_key else ""
