"""Deployments of real Redis servers for tests: a master with replicas and Sentinels, a cluster, a server with TLS."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from .ports import free_port
from .redis_server import PATIENCE_S, RedisServer

MASTER = "causeway"
_TICK_S = 0.05
_HELLO_MS = 200  # between what a Sentinel tells the others; Redis takes two seconds and one
_DOWN_AFTER_MS = 2000  # a master on a busy machine is not taken for dead


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll other processes: nothing tells us."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < ends, what
        time.sleep(_TICK_S)


class SentinelDeployment:
    """A master, its replicas and three Sentinels that promote a replica within a few seconds."""

    def __init__(
        self, folder: Path, *settings: str, replicas: int = 1, password: str = "", sentinel_password: str = ""
    ) -> None:
        self._folder = folder
        self._settings = (*settings, *(("--requirepass", password, "--masterauth", password) if password else ()))
        self._password = password
        self._sentinel_password = sentinel_password
        self.servers: list[RedisServer] = []
        self._sentinels: list[subprocess.Popen[bytes]] = []
        self._sentinel_ports = [free_port() for _ in range(3)]
        try:
            self.servers.append(self._server("redis-1"))
            for number in range(replicas):
                self.servers.append(self._server(f"redis-{number + 2}", self.servers[0].port))
            wait_until(lambda: self._replicas_are_online(replicas), "the replicas do not follow their master")
            for number, port in enumerate(self._sentinel_ports, 1):
                self._start_sentinel(number, port, self.servers[0].port, 2)
            wait_until(self._hello_is_quick, "the Sentinels do not answer")
            wait_until(lambda: self._sentinels_agree(replicas), "the Sentinels do not find each other")
        except BaseException:
            self.kill()
            raise

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._sentinel_ports)
        return f"redis+sentinel://{hosts}/{MASTER}/0"

    @property
    def master(self) -> RedisServer:
        """The server that the Sentinels call the master."""
        with self._sentinel(self._sentinel_ports[0]) as sentinel:
            _, port = sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
        return next(server for server in self.servers if server.port == int(port))

    @property
    def replicas(self) -> list[RedisServer]:
        master = self.master
        return [server for server in self.servers if server is not master]

    def fail_over(self) -> RedisServer:
        """Kill the master with SIGKILL and wait until the Sentinels have promoted a replica. Returns the old master."""
        old = self.master
        old.kill()
        self.wait_for_promotion(old)
        return old

    def wait_for_promotion(self, old: RedisServer) -> None:
        wait_until(lambda: self.master is not old and self._failover_is_over(), "no replica was promoted")

    def fail_over_to(self, laggard: RedisServer) -> list[RedisServer]:
        """Kill every server but a replica that was killed before, and wait until that one, restarted, is promoted.

        What it missed is lost. A paused replica would not do: it reads what its socket has buffered when it resumes.
        Returns the killed servers.
        """
        master = self.master
        killed = [server for server in self.servers if server is not laggard]
        for server in killed:
            server.kill()
        laggard.start("--replicaof", f"127.0.0.1 {master.port}")
        wait_until(lambda: self.master is laggard and self._failover_is_over(), "the laggard was not promoted")
        return killed

    def rejoin(self, server: RedisServer) -> None:
        """Start a killed server as a replica of the master, and wait until it has all its data."""
        server.start("--replicaof", f"127.0.0.1 {self.master.port}")
        wait_until(lambda: _link_is_up(server), "the old master does not follow the new one")

    def stop_asking_servers(self) -> None:
        """Let the Sentinels believe what they know: they read no more roles and offsets, and change no roles."""
        for port in self._sentinel_ports:
            with self._sentinel(port) as sentinel:
                sentinel.execute_command("SENTINEL", "DEBUG", "info-period", 86_400_000)

    def kill_sentinels(self) -> None:
        for sentinel in self._sentinels:
            sentinel.kill()
            sentinel.wait()

    def kill(self) -> None:
        self.kill_sentinels()
        for server in self.servers:
            server.kill()

    def _sentinel(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, password=self._sentinel_password or None)

    def _server(self, name: str, master: int = 0) -> RedisServer:
        folder = self._folder / name
        folder.mkdir()
        of_master = ("--replicaof", f"127.0.0.1 {master}") if master else ()
        return RedisServer(folder, "--repl-diskless-sync-delay", "0", *self._settings, *of_master)

    def start_stale_sentinel(self) -> str:
        """Start a Sentinel that takes a replica for the master. Returns its URL."""
        port = free_port()
        self._start_sentinel(0, port, self.replicas[0].port, 1)
        return f"redis+sentinel://127.0.0.1:{port}/{MASTER}/0"

    def _start_sentinel(self, number: int, port: int, master: int, quorum: int) -> None:
        folder = self._folder / f"sentinel-{number}"
        folder.mkdir()
        path = folder / "sentinel.conf"
        path.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {master} {quorum}\n"
            f"sentinel down-after-milliseconds {MASTER} {_DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {MASTER} 2000\n"
            + (f'sentinel auth-pass {MASTER} "{self._password}"\n' if self._password else "")
            + (f'requirepass "{self._sentinel_password}"\n' if self._sentinel_password else "")
        )
        command = ["redis-server", str(path), "--sentinel", "--loglevel", "warning"]
        self._sentinels.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    def _replicas_are_online(self, replicas: int) -> bool:
        with self.servers[0].client() as client:
            return str(client.info("replication")).count("'state': 'online'") == replicas

    def _failover_is_over(self) -> bool:
        """Whether every Sentinel names the promoted replica, and none still works at it.

        A Sentinel whose promoted replica dies before the failover is over waits for it without end (Redis 7).
        """
        master = self.master
        for port in self._sentinel_ports:
            with self._sentinel(port) as sentinel:
                state = sentinel.sentinel_master(MASTER)
                if (state["port"], state["flags"]) != (master.port, "master"):
                    return False
        return _role(master) == "master"

    def _hello_is_quick(self) -> bool:
        for port in self._sentinel_ports:
            with self._sentinel(port) as sentinel:
                sentinel.execute_command("SENTINEL", "DEBUG", "publish-period", _HELLO_MS, "ask-period", _HELLO_MS)
        return True

    def _sentinels_agree(self, replicas: int) -> bool:
        for port in self._sentinel_ports:
            with self._sentinel(port) as sentinel:
                state = sentinel.sentinel_master(MASTER)
                if state["num-slaves"] != replicas or state["num-other-sentinels"] != 2 or state["flags"] != "master":
                    return False
        return True


class ClusterDeployment:
    """Three masters that share the slots."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.servers: list[RedisServer] = []
        try:
            for number in range(3):
                place = folder / f"node-{number}"
                place.mkdir()
                # The port of the cluster bus, by default 10,000 above, may be taken or too high.
                bus = ("--cluster-port", str(free_port()))
                self.servers.append(RedisServer(place, "--cluster-enabled", "yes", *bus, *settings))
            addresses = [f"127.0.0.1:{server.port}" for server in self.servers]
            command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
            wait_until(self._is_complete, "the cluster's nodes do not agree")
        except BaseException:
            self.kill()
            raise

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers[:2])

    def keys_by_node(self) -> list[set[str]]:
        """The keys of each node."""
        found = []
        for server in self.servers:
            with server.client() as client:
                found.append({key.decode() for key in client.scan_iter()})
        return found

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def _is_complete(self) -> bool:
        for server in self.servers:
            with server.client() as client:
                info = client.execute_command("CLUSTER INFO")
            if (info["cluster_state"], info["cluster_known_nodes"]) != ("ok", "3"):
                return False
        return True


class Certificates:
    """An authority, a server's certificate for 127.0.0.1 and a client's, as PEM files."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.server, self.server_key = folder / "ca.pem", folder / "server.pem", folder / "server.key"
        self.client, self.client_key = folder / "client.pem", folder / "client.key"
        authority = ec.generate_private_key(ec.SECP256R1())
        issuer = _name("test authority")
        _write(self.ca, _certificate(issuer, issuer, authority.public_key(), authority, is_authority=True))
        for name, certificate, key_file in (
            ("redis", self.server, self.server_key),
            ("client", self.client, self.client_key),
        ):
            key = ec.generate_private_key(ec.SECP256R1())
            _write(certificate, _certificate(_name(name), issuer, key.public_key(), authority))
            encryption = serialization.NoEncryption()
            form = serialization.PrivateFormat.PKCS8
            key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))


class TlsServer(RedisServer):
    """A server that speaks TLS only and asks for a client's certificate."""

    def __init__(self, folder: Path, certificates: Certificates, *settings: str) -> None:
        self._certificates = certificates
        files = ("--tls-ca-cert-file", str(certificates.ca), "--tls-cert-file", str(certificates.server))
        super().__init__(folder, *files, "--tls-key-file", str(certificates.server_key), *settings)

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0"

    @property
    def listen(self) -> tuple[str, ...]:
        return ("--port", "0", "--tls-port", str(self.port))

    def client(self, **more: Any) -> redis.Redis:
        files = self._certificates
        keys: dict[str, Any] = {
            "ssl_ca_certs": str(files.ca),
            "ssl_certfile": str(files.client),
            "ssl_keyfile": str(files.client_key),
        }
        return redis.Redis(host="127.0.0.1", port=self.port, ssl=True, **keys, **more)


def _role(server: RedisServer) -> str:
    with server.client() as client:
        return str(client.info("replication")["role"])


def _link_is_up(server: RedisServer) -> bool:
    with server.client() as client:
        return client.info("replication").get("master_link_status") == "up"


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool = False,
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    day = dt.timedelta(days=1)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    usage = x509.KeyUsage(not is_authority, False, False, False, False, is_authority, is_authority, False, False)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 365 * day)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )


def _write(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


@contextlib.contextmanager
def running(deployment: SentinelDeployment | ClusterDeployment | RedisServer) -> Iterator[Any]:
    """Kill everything at the end of a `with` block."""
    try:
        yield deployment
    finally:
        deployment.kill()
