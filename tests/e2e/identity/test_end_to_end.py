"""One identity on real processes: control plane, gateway and edge daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from tests.edge_node.agent.fleet import Publisher

from .processes import ROOT, Site

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.stop()


def test_one_identity_opens_both_and_its_revocation_closes_both(site: Site) -> None:
    site.start_plane()
    joined = site.join()
    assert (joined.returncode, joined.stderr) == (0, "")
    assert "Joined stores as kiosk-1 (tenant acme, cohort kiosk)." in joined.stdout
    site.start_gateway()
    edge = site.start_edge()
    # The token reaches the gateway: the request passes its identity check, and there is no Triton behind it.
    site.until(lambda: site.ask()[0] == 200 and [row for row in site.audited() if row["device"] == "kiosk-1"])
    assert site.audited()[-1]["tenant"] == "acme"
    assert site.command("fleet", "status").returncode == 0
    site.until(lambda: site.rows("select running, state from devices where last_seen > 0") == [(None, "idle")])
    # Revoked: the gateway and the control plane refuse, and the device goes on.
    site.revoke()
    site.until(lambda: site.ask()[0] == 200 and "device_revoked" in site.problems())
    assert not [row for row in site.audited()[-1:] if row["outcome"] == "ok"]
    status = site.command("fleet", "status", "--format", "json")
    assert status.returncode == 1
    assert "device_revoked" in str(json.loads(status.stdout)["link"]["problems"])
    # It takes a new identity to come back.
    assert edge.stop() == 0
    assert site.command("fleet", "leave", "--yes").returncode == 0
    assert site.command("fleet", "status").returncode == 1
    assert site.join("kiosk-2").returncode == 0
    site.start_edge()
    site.until(lambda: site.ask()[0] == 200 and [row for row in site.audited() if row["device"] == "kiosk-2"])


def test_one_identity_over_mtls(tmp_path: Path) -> None:
    """The fleet's CA made all certificates. The device presents its own, and its revocation refuses it."""
    site = Site(tmp_path, tls=True)
    try:
        site.start_plane()
        joined = site.join()
        assert (joined.returncode, joined.stderr) == (0, "")
        site.start_gateway()
        site.start_edge()
        site.until(lambda: site.ask()[0] == 200 and [row for row in site.audited() if row["device"] == "kiosk-1"])
        issued = site.state_dir / "fleet" / "device-tls.pem"
        assert issued.stat().st_mode & 0o777 == 0o600
        url, ca = f"https://127.0.0.1:{site.gateway_port}/v1/models", str(tmp_path / "tls" / "ca.pem")
        alone = urllib3.PoolManager(ca_certs=ca, cert_file=str(issued), retries=False)
        assert alone.request("GET", url).status == 200  # without a token
        with pytest.raises(urllib3.exceptions.HTTPError):
            urllib3.PoolManager(ca_certs=ca, retries=False).request("GET", url)
        site.revoke()
        site.until(lambda: alone.request("GET", url).status == 401)
    finally:
        site.stop()


def test_telemetry_arrives_and_survives_the_control_plane(site: Site) -> None:
    """What was counted while the control plane was away is sent when it is back, at the latest when the daemon ends."""
    plane = site.start_plane()
    assert site.join().returncode == 0
    edge = site.start_edge()
    site.until(lambda: site.rows("select id from devices where last_seen > 0"))
    plane.kill()
    for _ in range(3):
        assert site.ask("device")[0] == 200
    site.start_plane()
    assert edge.stop() == 0
    assert site.rows("select device, bundle, requests, errors from telemetry") == [("kiosk-1", "", 3, 0)]


def test_a_device_starts_without_its_control_plane_and_says_so(site: Site) -> None:
    """It answers by itself; the cloud opens once the control plane is back."""
    plane = site.start_plane()
    assert site.join().returncode == 0
    site.start_gateway()
    plane.kill()
    site.start_edge()
    site.until(lambda: "cannot be renewed" in site.problems())
    status, headers = site.ask()
    assert (status, headers["x-causeway-target"]) == (200, "small")
    site.start_plane()
    site.until(lambda: site.ask()[0] == 200 and [row for row in site.audited() if row["device"] == "kiosk-1"])
    assert "cannot be renewed" not in site.problems()


def test_a_signed_bundle_reaches_the_device_and_its_telemetry_names_it(tmp_path: Path) -> None:
    """Metadata and blobs over HTTP from the control plane, permission to change, status and telemetry under it."""
    publisher = Publisher(tmp_path / "fleet")
    bundle = publisher.release(model="assistant")
    site = Site(tmp_path, publisher.path)
    try:
        site.start_plane()
        joined = site.join()
        assert joined.returncode == 0, joined.stderr
        edge = site.start_edge()
        site.until(lambda: site.rows("select running, state from devices") == [(bundle, "trial")])
        assert site.ask()[0] == 200
        assert site.command("fleet", "status").stdout.count(bundle) == 1
        assert edge.stop() == 0
        assert site.rows(f"select requests from telemetry where bundle = '{bundle}'") == [(1,)]
    finally:
        site.stop()


def test_a_gateway_that_restarts_alone_uses_its_copy(site: Site) -> None:
    plane = site.start_plane()
    assert site.join().returncode == 0
    gateway = site.start_gateway()
    site.start_edge()
    site.until(lambda: site.ask()[0] == 200 and [row for row in site.audited() if row["device"] == "kiosk-1"])
    plane.kill()
    gateway.kill()
    site.start_gateway()
    before = len(site.audited())
    site.until(lambda: site.ask()[0] == 200 and [row for row in site.audited()[before:] if row["device"] == "kiosk-1"])


def test_a_daemon_with_a_damaged_identity_answers(site: Site) -> None:
    site.start_plane()
    assert site.join().returncode == 0
    (site.state_dir / "fleet" / "identity.json").write_text("{")
    site.start_edge()
    assert site.ask("device")[0] == 200
    assert "damaged" in site.problems()


def test_leaving_needs_a_stopped_daemon(site: Site) -> None:
    site.start_plane()
    assert site.join().returncode == 0
    site.start_edge()
    left = site.command("fleet", "leave", "--yes")
    assert left.returncode == 2
    assert "Stop it" in left.stderr
    assert (site.state_dir / "fleet" / "identity.json").exists()


@pytest.mark.parametrize("fault", ["unknown", "away", "used"])
def test_joining_says_what_is_wrong(site: Site, fault: str) -> None:
    plane = site.start_plane()
    if fault == "used":
        token = site.join_token()
        assert site.join(token=token).returncode == 0
        assert site.command("fleet", "leave", "--yes").returncode == 0
        joined = site.join("kiosk-2", token=token)
        assert (joined.returncode, "join_token_used" in joined.stderr) == (1, True)
        return
    if fault == "away":
        plane.kill()
    joined = site.join(token="cwjoin_stolen")
    assert joined.returncode == {"unknown": 1, "away": 3}[fault]
    assert {"unknown": "join_token_unknown", "away": "cannot be reached"}[fault] in joined.stderr
    assert not (site.state_dir / "fleet" / "identity.json").exists()


def test_a_daemon_that_never_joined_imports_nothing_of_the_fleet(tmp_path: Path) -> None:
    program = (
        "import sys; from causeway_server.edge_node.app import build; "
        "from causeway_server.edge_node.config.schema import Config, EngineConfig; "
        f"build(Config(state_dir={str(tmp_path)!r}, engine=EngineConfig(enabled=False))); "
        "unwanted = ('causeway_server.edge_node.agent', 'tuf', 'cryptography', 'httpx'); "
        "print([name for name in sys.modules if name.startswith(unwanted)])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
