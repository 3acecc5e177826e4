"""SIGHUP: reload the endpoints of the configuration file without a restart. A faulty file changes nothing."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

import msgspec

from router.errors import ConfigError

from ...config.schema import Config
from .pools import Pools

_log = logging.getLogger("causeway.cloud.balancing")


def reload_on_sighup(pools: Pools, config: Config, reread: Callable[[], Config]) -> None:
    """Install the signal handler in the running loop. `config` is the one that the process started with."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload_or_log, pools, config, reread)


def _reload_or_log(pools: Pools, config: Config, reread: Callable[[], Config]) -> None:
    try:
        reload_endpoints(pools, config, reread)
    except ConfigError as error:
        _log.error("the configuration is faulty, the endpoints stay as they are: %s", error.message)


def reload_endpoints(pools: Pools, config: Config, reread: Callable[[], Config]) -> None:
    """Apply the endpoints of the reread configuration. Raises ConfigError if it is faulty, and changes nothing."""
    new = reread()
    if _without_endpoints(new) != _without_endpoints(config):
        _log.warning("a reload applies endpoints only; the other changes in the configuration need a restart")
    pools.update_endpoints({tier.name: tier.endpoint_addresses for tier in new.tiers})
    _log.info("the endpoints were reloaded")


def _without_endpoints(config: Config) -> Config:
    tiers = tuple(msgspec.structs.replace(tier, triton="", endpoints=()) for tier in config.tiers)
    return msgspec.structs.replace(config, tiers=tiers)
