"""Ports, the Unix socket, the cloud, and the clock that the cloud's Date header is held against."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import psutil

from ...config.schema import CloudConfig, ServerConfig
from .finding import Finding, fail, ok, warn

_PROBE_TIMEOUT_S = 2.0
_SKEW_WARN_S = 30.0  # more, and records of box and cloud cannot be laid beside each other
_SKEW_FAIL_S = 300.0  # more, and certificates and signatures begin to fail


def check_port(server: ServerConfig) -> Finding:
    """Free, or already ours."""
    at = f"{server.host}:{server.port}"
    if server.port == 0:
        return ok("port", f"any free one on {server.host}")
    try:
        with socket.create_server((server.host, server.port), family=_family(server.host)):
            return ok("port", f"{at} is free")
    except OSError as error:
        if error.errno == errno.EACCES:
            return fail("port", f"{at}: ports below 1024 need a privilege", "choose another with server.port")
        if error.errno == errno.EADDRNOTAVAIL:
            return fail("port", f"{server.host} is no address of this machine", "set server.host")
        if error.errno != errno.EADDRINUSE:
            return fail("port", f"{at}: {error.strerror or error}", "set server.host and server.port")
    if _is_ours(f"http://{_dialled(server.host)}:{server.port}", None):
        return ok("port", f"{at} is taken by a Causeway daemon that runs already")
    holder = _holder(server.port)
    return fail("port", f"{at} is taken by {holder}", "stop it, or choose another with server.port")


def check_socket(path: str) -> Iterator[Finding]:
    if not path:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        yield fail("socket", f"{folder} does not exist", "make the folder (systemd: RuntimeDirectory=causeway)")
    elif not os.access(folder, os.W_OK):
        yield fail("socket", f"{folder} is not writable", "give it to the daemon's account")
    elif len(os.fsencode(path)) > 107:
        yield fail("socket", f"{path} is longer than a socket's path may be (107 bytes)", "choose a shorter one")
    elif not Path(path).exists():
        yield ok("socket", f"{path} is free")
    elif _is_ours("http://causeway", path):
        yield ok("socket", f"{path} is a Causeway daemon's that runs already")
    elif Path(path).is_socket():
        yield ok("socket", f"{path} was left by a daemon that ended; the next one takes it over")
    else:
        yield fail("socket", f"{path} exists and is no socket", "choose another with server.socket")


def _is_ours(url: str, uds: str | None) -> bool:
    """Whether a Causeway daemon answers there: its readiness says which policy is in force."""
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=uds), timeout=_PROBE_TIMEOUT_S, trust_env=False) as client:
            told = client.get(f"{url}/readyz").json()
    except (httpx.HTTPError, ValueError):
        return False
    return isinstance(told, dict) and {"policy", "waiting_for"} <= told.keys()


def _holder(port: int) -> str:
    """Who listens there, as far as we may know."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                return (
                    f"{psutil.Process(connection.pid).name()} (pid {connection.pid})" if connection.pid else "another"
                )
    except (psutil.Error, OSError):
        pass
    return "another program"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _dialled(host: str) -> str:
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return everywhere.get(host, f"[{host}]" if ":" in host else host)


def check_exposure(server: ServerConfig) -> Iterator[Finding]:
    if server.host not in ("127.0.0.1", "::1", "localhost") and not server.keys:
        told = f"the daemon will listen on {server.host} and ask nobody for a key"
        yield warn("exposure", told, "set server.keys, or listen on 127.0.0.1")


def check_cloud(cloud: CloudConfig, unix_time: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Reachable, with our token accepted; and how far its clock is from ours."""
    if not cloud.url:
        yield ok("cloud", "none: this box answers by itself")
        return
    try:
        verify: ssl.SSLContext | bool = ssl.create_default_context(cafile=cloud.ca_file) if cloud.ca_file else True
    except (OSError, ssl.SSLError) as error:
        yield fail("cloud", f"cloud.ca_file {cloud.ca_file}: {error}", "name a PEM file with the authority")
        return
    headers = {"authorization": f"Bearer {cloud.api_key}"} if cloud.api_key else {}
    started = time.monotonic()
    try:
        with httpx.Client(verify=verify, timeout=cloud.connect_timeout_s + _PROBE_TIMEOUT_S, trust_env=False) as client:
            answer = client.get(f"{cloud.url}/models", headers=headers)
    except httpx.HTTPError as error:
        told = f"{cloud.url}: {str(error) or type(error).__name__}"
        yield warn("cloud", told, "the box answers alone until it is back; look at cloud.url, DNS, firewall, ca_file")
        return
    except httpx.InvalidURL as error:
        yield fail("cloud", f"{cloud.url}: {error}", "mend cloud.url")
        return
    yield _judge(cloud, answer, (time.monotonic() - started) * 1000)
    yield from _judge_clock(answer.headers.get("date", ""), unix_time())


def _judge(cloud: CloudConfig, answer: httpx.Response, ms: float) -> Finding:
    if answer.status_code in (401, 403):
        told = f"{cloud.url} refuses our token ({answer.status_code})"
        return fail("cloud", told, "set cloud.api_key_file to this device's token")
    if answer.status_code == 404:
        return warn("cloud", f"{cloud.url}/models is not found", "cloud.url usually ends in /v1")
    if answer.status_code >= 400:
        return warn("cloud", f"{cloud.url} says {answer.status_code}", "the box answers alone until that is mended")
    return ok("cloud", f"{cloud.url} answers in {ms:.0f} ms")


def _judge_clock(date: str, now: float) -> Iterator[Finding]:
    try:
        skew_s = now - parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return
    told = f"ours is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the cloud's"
    if abs(skew_s) > _SKEW_FAIL_S:
        yield fail("clock", told, "set the clock: systemctl enable --now systemd-timesyncd (or chrony)")
    elif abs(skew_s) > _SKEW_WARN_S:
        yield warn("clock", told, "turn on time synchronisation (systemd-timesyncd or chrony)")
    else:
        yield ok("clock", told if abs(skew_s) >= 2 else "agrees with the cloud's")
