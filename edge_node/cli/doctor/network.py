"""Checks of ports, the Unix socket, the cloud, the clock against the cloud's Date header, collector and broker."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import msgspec
import psutil
from cryptography.hazmat.primitives.serialization import Encoding

from causeway_server.router.config import TracingConfig
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.addresses import url_of
from causeway_server.router.serving.tls.contexts import check_certificate, client_tls, read_certificate, server_tls

from ...backends.cloud.connection import tls_files
from ...config.schema import CloudConfig, Config, MqttConfig, ServerConfig
from ...mqtt.messages import BrokerError
from ...mqtt.topics import BrokerUrl, Topics
from . import Finding, fail, ok, warn

_PROBE_TIMEOUT_S = 2.0
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where this machine reaches a server that listens on all addresses
_TRITON = "http://127.0.0.1:8000"  # HTTP address of a Triton with default settings
_SKEW_WARN_S = 30.0  # above, records of the device and the cloud cannot be compared by time
_SKEW_FAIL_S = 300.0  # above, certificates and signatures begin to fail


def check_port(server: ServerConfig) -> Finding:
    """Check that the address is free, or held by a Causeway daemon."""
    address = f"{server.host}:{server.port}"
    if server.port == 0:
        return ok("port", f"Any free port on {server.host}.")
    try:
        with socket.create_server((server.host, server.port), family=_family(server.host)):
            return ok("port", f"{address} is free.")
    except OSError as error:
        if error.errno == errno.EACCES:
            return fail(
                "port", f"{address}: ports below 1024 require a privilege.", "Choose another port with server.port."
            )
        if error.errno == errno.EADDRNOTAVAIL:
            return fail("port", f"{server.host} is not an address of this machine.", "Set server.host.")
        if error.errno != errno.EADDRINUSE:
            return fail("port", f"{address}: {error.strerror or error}", "Set server.host and server.port.")
    host = _REACHED_AT.get(server.host, server.host)
    is_ours = _has_certificate(host, server) if server.tls.cert_file else _is_causeway(url_of(host, server.port), None)
    if is_ours:
        return ok("port", f"{address} is used by a running Causeway daemon.")
    holder = _port_holder(server.port)
    return fail(
        "port", f"{address} is used by {holder}.", "Stop that program, or choose another port with server.port."
    )


def check_socket(path: str) -> Iterator[Finding]:
    """Check that the Unix socket's path can be used, is free, or is held by a Causeway daemon."""
    if not path:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        yield fail("socket", f"{folder} does not exist.", "Create the folder (systemd: RuntimeDirectory=causeway).")
    elif not os.access(folder, os.W_OK):
        yield fail("socket", f"{folder} is not writable.", "Give the folder to the daemon's account.")
    elif len(os.fsencode(path)) > 107:
        yield fail("socket", f"{path} is longer than a socket path may be (107 bytes).", "Choose a shorter path.")
    elif not Path(path).exists():
        yield ok("socket", f"{path} is free.")
    elif _is_causeway("http://causeway", path):
        yield ok("socket", f"{path} is used by a running Causeway daemon.")
    elif Path(path).is_socket():
        yield ok("socket", f"{path} was left behind by a daemon that has ended; the next daemon replaces it.")
    else:
        yield fail("socket", f"{path} exists and is not a socket.", "Choose another path with server.socket.")


def _has_certificate(host: str, server: ServerConfig) -> bool:
    """Return whether the address has the daemon's certificate. The handshake is enough: it may ask for ours."""
    try:
        found = ssl.get_server_certificate((host, server.port), timeout=_PROBE_TIMEOUT_S)
        ours = read_certificate(Path(server.tls.cert_file), "server.tls.cert_file")
    except (OSError, ConfigError):
        return False
    return ssl.PEM_cert_to_DER_cert(found) == ours.public_bytes(Encoding.DER)


def _is_causeway(url: str, uds: str | None) -> bool:
    """Return whether a Causeway daemon answers at `url`: its readiness document names a policy."""
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=uds), timeout=_PROBE_TIMEOUT_S, trust_env=False) as client:
            document = client.get(f"{url}/readyz").json()
    except (httpx.HTTPError, ValueError):
        return False
    return isinstance(document, dict) and {"policy", "waiting_for"} <= document.keys()


def _port_holder(port: int) -> str:
    """Return the name of the process that listens on the port, as far as this account may see it."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if not connection.pid:
                    return "another program"
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return "another program"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def check_exposure(config: Config) -> Iterator[Finding]:
    """Check that the daemon is not exposed to other machines without an API key: it would not start."""
    if config.is_exposed:
        text = (
            f"The daemon would listen on {config.server.host or 'all addresses'} without requiring an API "
            "key, so it does not start."
        )
        yield fail(
            "exposure", text, "Set server.keys, identity.issuers or server.tls.client_ca_file, or listen on 127.0.0.1."
        )


def check_tls(server: ServerConfig) -> Iterator[Finding]:
    """Check the daemon's own certificate: with an unusable one it would not start."""
    try:
        context = server_tls(server.tls, "server.tls")
    except ConfigError as error:
        yield fail("tls", error.message, "Correct the certificate files or server.tls; see router/TLS.md.")
        return
    if context is not None:
        left_days = (check_certificate(context.files, time.time()) - time.time()) / 86400
        yield ok("tls", f"The certificate {context.files.cert_file} is valid for {left_days:.0f} more days.")


def check_triton(url: str = _TRITON) -> Iterator[Finding]:
    """Warn about a Triton on this machine that lets any program change its models: by default it serves HTTP on this
    port, beside gRPC; our launcher turns that off.
    """
    try:
        with httpx.Client(timeout=_PROBE_TIMEOUT_S, trust_env=False) as client:
            response = client.post(f"{url}/v2/repository/index", json={})
            is_open = response.status_code == 200 and isinstance(response.json(), list)
    except (httpx.HTTPError, ValueError):
        return
    if is_open:
        text = f"The Triton at {url} allows model control to any program, and loading a model runs code."
        advice = "Start Triton with `causeway-cloud triton`, or with --allow-http=false and --grpc-restricted-protocol."
        yield warn("triton", text, advice)


def check_clouds(clouds: Sequence[CloudConfig]) -> Iterator[Finding]:
    """Check each cloud."""
    if not clouds:
        yield ok("cloud", "No cloud is configured: this device answers alone.")
    for cloud in clouds:
        yield from check_cloud(cloud)


def check_cloud(cloud: CloudConfig, unix_time: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Check that the cloud answers and accepts the token, and compare its clock with `unix_time`, this device's."""
    try:
        files = tls_files(cloud)
        verify: ssl.SSLContext | bool = client_tls(files).newest() if files.paths else True
    except ConfigError as error:
        yield fail("cloud", error.message, "Correct the file, or name another file.")
        return
    headers = {"authorization": f"Bearer {cloud.key}"} if cloud.key else {}
    started = time.monotonic()
    try:
        with httpx.Client(verify=verify, timeout=cloud.connect_timeout_s + _PROBE_TIMEOUT_S, trust_env=False) as client:
            response = client.get(f"{cloud.url}/models", headers=headers)
    except httpx.HTTPError as error:
        text = f"{cloud.url}: {str(error) or type(error).__name__}"
        advice = (
            f"Until the cloud is back, the device answers without it. Check clouds.{cloud.name}.url, DNS, the firewall "
            f"and clouds.{cloud.name}.ca_file."
        )
        yield warn("cloud", text, advice)
        return
    except httpx.InvalidURL as error:
        yield fail("cloud", f"{cloud.url}: {error}", f"Correct clouds.{cloud.name}.url.")
        return
    yield _check_response(cloud, response, (time.monotonic() - started) * 1000)
    yield from _check_clock(response.headers.get("date", ""), unix_time())


def _check_response(cloud: CloudConfig, response: httpx.Response, elapsed_ms: float) -> Finding:
    if response.status_code in (401, 403):
        text = f"{cloud.url} rejects the token ({response.status_code})."
        return fail("cloud", text, f"Set clouds.{cloud.name}.key_file to this device's token.")
    if response.status_code == 404:
        return warn(
            "cloud", f"{cloud.url}/models does not exist (HTTP 404).", f"clouds.{cloud.name}.url usually ends in /v1."
        )
    if response.status_code >= 400:
        advice = "Until the cloud works again, the device answers without it."
        return warn("cloud", f"{cloud.url} answers {response.status_code}.", advice)
    return ok("cloud", f"{cloud.url} answers in {elapsed_ms:.0f} ms.")


def _check_clock(date: str, now: float) -> Iterator[Finding]:
    try:
        skew_s = now - parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return
    text = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the cloud's."
    if abs(skew_s) > _SKEW_FAIL_S:
        yield fail("clock", text, "Set the clock: systemctl enable --now systemd-timesyncd (or chrony).")
    elif abs(skew_s) > _SKEW_WARN_S:
        yield warn("clock", text, "Turn on time synchronisation (systemd-timesyncd or chrony).")
    else:
        yield ok("clock", text if abs(skew_s) >= 2 else "The clock agrees with the cloud's.")


def check_tracing(config: TracingConfig) -> Iterator[Finding]:
    """Send an empty export to the collector. Yields nothing if tracing is off."""
    if not config.endpoint:
        return
    # On demand: OpenTelemetry takes a tenth of a second to load.
    from causeway_server.router.serving.otel import send_empty_export

    fault = asyncio.run(send_empty_export(config.endpoint))
    if fault:
        yield warn("tracing", f"The collector at {config.endpoint} refuses traces.", fault)
    else:
        yield ok("tracing", f"The collector at {config.endpoint} accepted an empty export.")


_CLIENT_ID = "causeway-doctor"


def check_broker(
    config: MqttConfig, find_package: Callable[[str], object] = importlib.util.find_spec
) -> Iterator[Finding]:
    """Check the keys and connect to the broker with a separate client id. Yields nothing without a broker."""
    if not config.url:
        return
    if find_package("paho") is None:
        text = "mqtt.url is set, but the extra `mqtt` is not installed, so the daemon does not start."
        yield fail("mqtt", text, "Run `make setup`, or `pip install 'causeway-router[mqtt]'`.")
        return
    try:
        broker = BrokerUrl(config.url)
        Topics(config, config.state_topic)
    except ConfigError as error:
        yield fail("mqtt", str(error), "Correct the key.")
        return
    yield asyncio.run(_connect(config, broker))


async def _connect(config: MqttConfig, broker: BrokerUrl) -> Finding:
    from ...mqtt.connection import Connection  # the extra is installed

    connection = Connection(msgspec.structs.replace(config, session_expiry_s=0.0), _CLIENT_ID, "", lambda _: None)
    try:
        await connection.open()
    except BrokerError as error:
        if error.lasting:
            return fail(
                "mqtt",
                error.message,
                "Correct the configuration keys under `mqtt`, or the broker's permissions for this device.",
            )
        return warn(
            "mqtt", error.message, "Messages are accepted once the broker answers. Check mqtt.url and the firewall."
        )
    finally:
        await connection.close()
    return ok("mqtt", f"The broker {broker} accepts this device.")
