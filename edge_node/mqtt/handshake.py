"""What a connection begins with: files of secrets and certificates, and a thread for what blocks."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from ..config.schema import MqttConfig
from .errors import BrokerError


def read_password(file: str) -> str | None:
    """Return the password of a file; None without one. Raises BrokerError."""
    if not file:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerError(f"mqtt.password_file {file} cannot be read: {error}", lasting=True) from error


def tls_context(config: MqttConfig) -> ssl.SSLContext:
    """Return what TLS is made with. Raises BrokerError."""
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
        if config.cert_file:
            context.load_cert_chain(config.cert_file, config.key_file or None)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(file for file in (config.ca_file, config.cert_file, config.key_file) if file)
        raise BrokerError(f"the TLS files of mqtt ({files}) cannot be used: {error}", lasting=True) from error
    return context


async def in_thread(work: Callable[[], None]) -> None:
    """Run what blocks in a thread that a shutdown does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def deliver(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(deliver, failure)

    threading.Thread(target=run, name="mqtt-connect", daemon=True).start()
    await done
