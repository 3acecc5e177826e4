"""Images, and the device's Debian package, built and tried in Debian: `make dist-check ARGS=debian`.

It needs root, and Debian's buildah, debootstrap, systemd-container and redis-server. Nothing is asked of a registry of
images: the base is made by debootstrap. An image runs as its user, under a root file system that is read-only, in
namespaces of its own; the package is installed, started, removed and purged under a booted systemd.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..environments import NETWORK_ADVICE
from ..places import Places
from ..progress import Progress, StepFailed, consent, run

SUITE = "bookworm"
PROGRAMS = ("buildah", "debootstrap", "systemd-nspawn", "dpkg-deb", "redis-server")
DOWNLOAD_MB, DISK_GB = 400, 6  # measured: 150 MB of Debian, the rest packages for Python
BASE = f"localhost/causeway-base:{SUITE}"
IMAGES = {
    "gateway": "cloud_pool/deploy/gateway.Dockerfile",
    "fleet": "fleet/deploy/fleet.Dockerfile",
    "edge": "edge_node/deploy/edge.Dockerfile",
}
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
QUESTION = {"model": "auto", "messages": [{"role": "user", "content": "wake me up at six am"}]}
PATIENCE_S = 1800.0  # of a busy machine: alone it boots, installs twice and purges in two minutes
# Bind mounts come as pairs of paths. The root file system is read-only but for them, /tmp and /proc.
_ENTER = """\
root=$1; shift
mount --bind "$root" "$root"
while [ "$1" != -- ]; do mkdir -p "$root$2"; mount --bind "$1" "$root$2"; shift 2; done; shift
mount -o remount,bind,ro "$root"
mount -t tmpfs tmpfs "$root/tmp"; mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"
exec chroot --userspec=10001:10001 --groups= "$root" "$@"
"""
_TRY = """\
#!/bin/sh
# What the booted system does: the exit status of the last step is in /tried.
trap 'echo "$?" > /tried; journalctl -u causeway-edge --no-pager > /journal; systemctl poweroff' EXIT
set -ex
echo force-unsafe-io > /etc/dpkg/dpkg.cfg.d/trial  # what is thrown away need not be synced, file by file
dpkg --install /causeway-edge.deb
systemctl is-active causeway-edge
systemctl is-enabled causeway-edge
/opt/causeway/.venv/bin/python3 /ask.py
dpkg --remove causeway-edge
! systemctl is-active causeway-edge
test ! -e /opt/causeway && test ! -e /lib/systemd/system/causeway-edge.service
test -e /var/lib/private/causeway && test -e /etc/causeway/edge.yaml
dpkg --install /causeway-edge.deb
systemctl is-enabled causeway-edge
/opt/causeway/.venv/bin/python3 /ask.py
dpkg --purge causeway-edge
test ! -e /var/lib/private/causeway && test ! -e /var/lib/private/causeway-key && test ! -e /etc/causeway
test ! -e /var/lib/causeway-edge.enabled
"""
_UNIT = """\
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/try.sh
StandardOutput=file:/output
StandardError=file:/output
[Install]
WantedBy=multi-user.target
"""
_ASK = f"""\
import json, urllib.request
body = json.dumps({QUESTION!r}).encode()
ask = urllib.request.Request("http://127.0.0.1:8080/v1/chat/completions", body, {{"content-type": "application/json"}})
with urllib.request.urlopen(ask) as answer:
    print(answer.headers["x-causeway-route"], json.load(answer)["choices"][0]["message"]["content"])
    assert answer.headers["x-causeway-route"] == "edge"
"""


def require_host() -> None:
    """Check for root and the programs. Raises StepFailed."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        raise StepFailed(
            f"Building for Debian needs root and {', '.join(missing or PROGRAMS)}.",
            "Debian: apt-get install buildah debootstrap systemd-container redis-server; then run it as root.",
        )


class Buildah:
    """buildah with a storage of its own in the cache, so that it touches nothing of the user's images."""

    def __init__(self, places: Places) -> None:
        self._logs = places.logs
        home = places.cache / "debian" / "images"
        self._command: tuple[str | Path, ...] = (
            "buildah",
            "--storage-driver",
            "overlay",
            "--root",
            home / "root",
            "--runroot",
            home / "run",
        )

    def __call__(self, command: str, *words: str | Path) -> None:
        run([*self._command, command, *words], log=self._logs / f"dist-buildah-{command}.log", advice=NETWORK_ADVICE)

    def read(self, *words: str | Path) -> str:
        return subprocess.run([*self._command, *words], check=True, capture_output=True, text=True).stdout.strip()

    @contextmanager
    def container(self, image: str) -> Iterator[tuple[str, Path]]:
        """Yield a container's name and its mounted root file system."""
        name = self.read("from", "--pull-never", image)
        try:
            yield name, Path(self.read("mount", name))
        finally:
            self.read("rm", name)


def make_base(places: Places, buildah: Buildah, progress: Progress) -> Path:
    """Make Debian with Python, once, as a folder and as an image. Returns the folder."""
    root = places.cache / "debian" / SUITE
    if not (root / "made").exists():
        progress.show("Debian")
        shutil.rmtree(root, ignore_errors=True)
        log = places.logs / "dist-debootstrap.log"
        packages = "--include=python3,python3-venv,ca-certificates"
        run(["debootstrap", "--variant=minbase", packages, SUITE, root], log=log, advice=NETWORK_ADVICE)
        run(["chroot", root, "apt-get", "clean"], log=log)
        with buildah.container("scratch") as (name, empty):
            run(["cp", "-a", f"{root}/.", empty], log=log)
            buildah("commit", name, BASE)
        (root / "made").touch()
    return root


def build_images(places: Places, buildah: Buildah, progress: Progress) -> None:
    for name, dockerfile in IMAGES.items():
        progress.show(f"image {name}")
        words = ("--isolation", "chroot", "--layers", "--build-arg", f"BASE={BASE}", "-t", f"causeway/{name}:checked")
        certificates = ("--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro")  # of a machine behind a proxy, too
        ignored = places.logs / "dockerignore"
        ignored.write_text(".venv*\n.git\nbuild\n.run\n")
        folder = places.root
        buildah("build", *words, *certificates, "--ignorefile", ignored, "-f", folder / dockerfile, folder)


@contextmanager
def started(
    buildah: Buildah, image: str, mounts: Mapping[Path, str], command: Sequence[str], log: Path
) -> Iterator[None]:
    """Run an image's entrypoint as its user under its root file system, which is read-only."""
    described = json.loads(buildah.read("inspect", "--type", "image", f"causeway/{image}:checked"))
    config = described["OCIv1"]["config"]
    if config["User"] != "10001:10001":
        raise StepFailed(f"The image {image} runs as {config['User']}.")
    with buildah.container(f"causeway/{image}:checked") as (_, root), log.open("w") as record:
        pairs = [str(word) for pair in mounts.items() for word in pair]
        enter = ("unshare", "--mount", "--pid", "--fork", "sh", "-ec", _ENTER, "enter", str(root))
        environ = dict(entry.split("=", 1) for entry in config["Env"])
        words = [*enter, *pairs, "--", "env", "-i", *(f"{key}={value}" for key, value in environ.items())]
        child = subprocess.Popen([*words, *config["Entrypoint"], *command], stdout=record, stderr=record)
        try:
            yield
            if child.poll() is not None:
                raise StepFailed(
                    f"The image {image} ended with status {child.returncode}.", tail=log.read_text()[-2000:]
                )
        finally:
            # The first process of the namespace: with it all others end. unshare's --kill-child would
            # not reach it, because chroot's change of user clears the signal.
            inside = Path(f"/proc/{child.pid}/task/{child.pid}/children")
            for number in inside.read_text().split() if inside.exists() else ():
                os.kill(int(number), signal.SIGKILL)
            child.wait()


def wait_for(url: str, log: Path, question: Mapping[str, object] | None = None) -> str:
    """Ask until there is an answer. Returns its header x-causeway-route. Raises StepFailed."""
    body = json.dumps(question).encode() if question else None
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return str(answer.headers.get("x-causeway-route", ""))
        except urllib.error.HTTPError as fault:
            if fault.code == 401:  # the worker's operators have a token
                return ""
            error: OSError = fault
        except OSError as fault:
            error = fault
        if time.monotonic() > until:
            raise StepFailed(f"{url}: {error}", tail=log.read_text()[-2000:])
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def owned(folder: Path) -> Path:
    """Make a folder that the images' user owns."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 10001, 10001)
    return folder


def try_images(places: Places, buildah: Buildah, home: Path) -> None:
    """Start each image, and ask it. Raises StepFailed."""
    home.chmod(0o755)
    gateway, operator, worker, redis, fleet, edge = free_ports(6)
    config = owned(home / "gateway")
    (config / "gateway.yaml").write_text(
        f"server: {{port: {gateway}}}\noperator: {{port: {operator}}}\nredis: {{url: redis://127.0.0.1:{redis}/0}}\n"
        "state_dir: /tmp/state\ntiers: [{name: assistant-large, triton: 127.0.0.1:9}]\n"
    )
    durable = ("--appendonly", "yes", "--appendfsync", "always", "--dir", str(owned(home / "redis")))
    server = subprocess.Popen(["redis-server", "--port", str(redis), "--bind", "127.0.0.1", *durable], stdout=-3)
    try:
        mounts, file = {config: "/etc/causeway"}, "/etc/causeway/gateway.yaml"
        log = places.logs / "dist-gateway.log"
        with started(buildah, "gateway", mounts, ("serve", "--config", file), log):
            wait_for(f"http://127.0.0.1:{gateway}/healthz", log)
        print("gateway: answers", flush=True)
        log = places.logs / "dist-worker.log"
        work = ("worker", "--config", file, "--operator-port", str(worker))
        with started(buildah, "gateway", mounts, work, log):
            wait_for(f"http://127.0.0.1:{worker}/healthz", log)
        print("worker: answers", flush=True)
    finally:
        server.terminate()
        server.wait()
    log = places.logs / "dist-fleet.log"
    folder, keys, state = (home / name for name in ("fleet", "keys", "state"))
    command = places.venv_python.with_name("causeway-fleet")
    run([command, "init", folder], log=log)
    for name in ("anna", "ben", "server"):
        run([command, "keys", "new", name, "--keys", folder / "keys"], log=log)
    offline, online = "{keys: [keys/anna.pub, keys/ben.pub], expires: 90d}", "{keys: [keys/server.pub], expires: 7d}"
    roles = [f"{role}: {offline}" for role in ("root", "artifacts")]
    roles += [f"{role}: {online}" for role in ("rollout", "snapshot", "timestamp")]
    (folder / "trust.yaml").write_text("\n".join(("version: 1", *roles, "")))
    for signer in ("anna", "ben", "anna", "server"):
        run([command, "sign", folder, "--key", folder / "keys" / f"{signer}.pem"], log=log)
    keys.mkdir()
    (folder / "keys" / "server.pem").rename(keys / "server.pem")
    mounts = {owned(folder): "/fleet", owned(keys): "/keys", owned(state): "/var/lib/causeway"}
    words = ("serve", "/fleet", "--keys", "/keys", "--state-dir", "/var/lib/causeway", "--listen", f"0.0.0.0:{fleet}")
    with started(buildah, "fleet", mounts, words, log):
        wait_for(f"http://127.0.0.1:{fleet}/readyz", log)
    print("control plane: ready", flush=True)
    log = places.logs / "dist-edge.log"
    mounts = {owned(home / "edge"): "/var/lib/causeway", owned(home / "edge-key"): "/var/lib/causeway-key"}
    options = ("serve", "--state-dir", "/var/lib/causeway", "--set", f"server.port={edge}")
    with started(buildah, "edge", mounts, options, log):
        wait_for(f"http://127.0.0.1:{edge}/readyz", log)
        route = wait_for(f"http://127.0.0.1:{edge}/v1/chat/completions", log, QUESTION)
    print(f"edge: answers on the {route}", flush=True)
    if route != "edge":
        raise StepFailed("The image of the device did not answer itself.")


def build_package(places: Places, buildah: Buildah, out: Path) -> Path:
    """Pack what the edge's image has, with the unit. Returns the package."""
    source, version = places.edge_deploy / "debian", project_version(places.root)
    with tempfile.TemporaryDirectory(dir=places.cache) as folder:
        stage = Path(folder, "package")
        with buildah.container("causeway/edge:checked") as (_, root):
            for name, target in (
                ("causeway-edge.service", "lib/systemd/system/causeway-edge.service"),
                ("edge.example.yaml", "etc/causeway/edge.yaml"),
            ):
                (stage / target).parent.mkdir(parents=True)
                shutil.copyfile(places.edge_deploy / name, stage / target)
            run(["cp", "-a", root / "opt", stage], log=places.logs / "dist-package.log")
            size = sum(path.lstat().st_size for path in stage.rglob("*") if not path.is_dir())
            control = stage / "DEBIAN"
            shutil.copytree(source, control)
            for script in ("postinst", "prerm", "postrm"):
                (control / script).chmod(0o755)
            (library,) = (root / "opt" / "causeway" / ".venv" / "lib").glob("python3*")
            minor = int(library.name.rpartition(".")[2])
            machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
            values = {
                "VERSION": version,
                "ARCHITECTURE": machine,
                "OLDEST": f"3.{minor}",
                "NEXT": f"3.{minor + 1}",
                "SIZE": str(size // 1024),
            }
            text = (control / "control").read_text()
            for key, value in values.items():
                text = text.replace(f"@{key}@", value)
            (control / "control").write_text(text)
            package = out / f"causeway-edge_{version}_{machine}.deb"
            words = ("dpkg-deb", "--root-owner-group", "-Zzstd", "--build", stage, package)
            run(words, log=places.logs / "dist-package.log")
    return package


def project_version(root: Path) -> str:
    return str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def try_package(places: Places, base: Path, package: Path) -> None:
    """Boot Debian with systemd, and let it install, ask, remove and purge the package. Raises StepFailed."""
    log = places.logs / "dist-nspawn.log"
    with tempfile.TemporaryDirectory(dir=places.cache) as folder:
        root = Path(folder, "root")
        run(["cp", "-a", base, root], log=log)
        systemd = ("apt-get", "install", "-y", "--no-install-recommends", "systemd", "systemd-sysv", "dbus")
        shutil.copyfile("/etc/resolv.conf", root / "etc" / "resolv.conf")
        run(["chroot", root, *systemd], log=log, environ={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
        shutil.copyfile(package, root / "causeway-edge.deb")
        (root / "try.sh").write_text(_TRY)
        (root / "try.sh").chmod(0o755)
        (root / "ask.py").write_text(_ASK)
        (root / "etc/systemd/system/try.service").write_text(_UNIT)
        run(["chroot", root, "systemctl", "enable", "try.service"], log=log)
        boot = ("systemd-nspawn", "--directory", root, "--register=no", "--keep-unit", "--private-network", "--boot")
        began = time.monotonic()
        ended = subprocess.run(
            ["timeout", "--kill-after=5", str(int(PATIENCE_S)), *boot],
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
        output, tried = (
            "".join(path.read_text() for path in map(root.joinpath, names) if path.exists())
            for names in (("output", "journal"), ("tried",))
        )
        if tried.strip() != "0":
            after = f"after {time.monotonic() - began:.0f} s, systemd-nspawn's status {ended}"
            raise StepFailed(f"The package failed under systemd {after}; {log} has the boot.", tail=output[-3000:])
    print("package: installed, answers, removed, installed again, purged", flush=True)


def check(places: Places) -> None:
    """Build and try everything. Raises StepFailed."""
    progress = Progress(sys.stdout)
    buildah = Buildah(places)
    progress.begin("[debian]", "building")
    base = make_base(places, buildah, progress)
    build_images(places, buildah, progress)
    progress.end("images are built")
    for line in json.loads(buildah.read("images", "--json")):
        if any("/causeway/" in name for name in line.get("names") or ()):
            print(f"{line['names'][0]}: {line['size']}")
    with tempfile.TemporaryDirectory(dir=places.cache) as folder:
        try_images(places, buildah, Path(folder))
    progress.begin("[debian]", "the device's package")
    package = build_package(places, buildah, places.root / "dist")
    progress.end(f"{package.name}: {package.stat().st_size / 1e6:.0f} MB")
    try_package(places, base, package)


def ask(places: Places) -> None:
    """Ask for consent to the download. Raises StepFailed without it, or where the host does not fit."""
    require_host()
    needs = f"{DOWNLOAD_MB} MB of downloads, and {DISK_GB} GB in {places.cache / 'debian'}"
    consent(f"Images and the package need {needs}.")
