"""A gateway that takes keys and revocations from a control plane."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

from causeway_server.cloud_pool.accounts.identity.authenticator import Authenticator, StaticTokens
from causeway_server.cloud_pool.accounts.identity.config import FleetIdentityConfig, IdentityConfig
from causeway_server.cloud_pool.accounts.identity.fleet import FleetTrust
from causeway_server.cloud_pool.accounts.identity.revocation import RevocationList
from causeway_server.cloud_pool.accounts.identity.token_verifier import KeySet, TokenVerifier
from causeway_server.cloud_pool.config import Config, Flags, load_config
from causeway_server.router.errors import AuthenticationFailed, ConfigError, IdentityUnavailable, PermissionDenied
from tests.cloud_pool.accounts.identity.gateway import running
from tests.cloud_pool.accounts.identity.token_issuer import Issuer
from tests.cloud_pool.unreachable import unreachable_tier

from .scripted_fleet import ScriptedFleet


@pytest.fixture
async def fleet() -> AsyncIterator[ScriptedFleet]:
    scripted = ScriptedFleet()
    async with scripted.running():
        yield scripted


class Gateway:
    """The identity check of one gateway with a clock of its own."""

    def __init__(self, config: IdentityConfig) -> None:
        self.now = 1000.0
        self.trust = FleetTrust(config.fleet, clock=lambda: self.now)
        key_file = Path(config.key_file) if config.key_file else None
        revocations = RevocationList(config, None, self.trust, clock=lambda: self.now)
        self.revocations = revocations
        verifier = TokenVerifier(config, KeySet(key_file, self.trust))
        self._authenticator = Authenticator(StaticTokens(), verifier, revocations, clock=lambda: self.now)

    def device(self, token: str) -> str:
        return self._authenticator.principal(f"Bearer {token}").device


def config(fleet: ScriptedFleet, folder: Path | None = None, **changes: object) -> IdentityConfig:
    copy = str(folder / "fleet.json") if folder is not None else ""
    source = FleetIdentityConfig(url=fleet.url, copy_file=copy, tenants=("stores",))
    return IdentityConfig(**{"fleet": source, **changes})  # type: ignore[arg-type]


async def test_a_devices_token_opens_the_gateway(fleet: ScriptedFleet) -> None:
    gateway = Gateway(config(fleet))
    await gateway.trust.refresh()
    assert gateway.device(fleet.token()) == "kiosk-1"
    await gateway.trust.close()


async def test_a_revoked_device_is_refused_after_one_refresh(fleet: ScriptedFleet) -> None:
    """A token that was verified and remembered before, too; others go on."""
    gateway = Gateway(config(fleet))
    await gateway.trust.refresh()
    token, other = fleet.token(now=time.time() - 5), fleet.token("kiosk-2")
    assert gateway.device(token) == "kiosk-1"
    fleet.revoke("kiosk-1")
    await gateway.trust.refresh()
    with pytest.raises(AuthenticationFailed, match="revoked"):
        gateway.device(token)
    assert gateway.device(other) == "kiosk-2"
    await gateway.trust.close()


def test_a_refresh_is_within_a_minute() -> None:
    assert FleetIdentityConfig().refresh_s <= 60
    with pytest.raises(msgspec.ValidationError, match="60"):
        msgspec.convert({"refresh_s": 61}, FleetIdentityConfig)


async def test_unchanged_documents_are_not_sent_again(fleet: ScriptedFleet) -> None:
    gateway = Gateway(config(fleet))
    for _ in range(3):
        await gateway.trust.refresh()
    assert [status for _, status in fleet.asked] == [200, 200, 304, 304, 304, 304]
    await gateway.trust.close()


async def test_a_removed_key_is_refused(fleet: ScriptedFleet) -> None:
    gateway = Gateway(config(fleet))
    await gateway.trust.refresh()
    old = fleet.token()
    assert gateway.device(old) == "kiosk-1"
    fleet.change_key()
    await gateway.trust.refresh()
    with pytest.raises(AuthenticationFailed, match="key"):
        gateway.device(old)
    assert gateway.device(fleet.token()) == "kiosk-1"
    await gateway.trust.close()


@pytest.mark.parametrize("fault", ["status", "garbage", "nested", "no keys", "gone"])
async def test_the_last_copy_stays_while_the_control_plane_is_away(fleet: ScriptedFleet, fault: str) -> None:
    """Counted once it is stale; `deny` answers 503."""
    settings = {"allow": Gateway(config(fleet, when_revocations_stale="allow")), "deny": Gateway(config(fleet))}
    fleet.revoke("kiosk-9")
    for gateway in settings.values():
        await gateway.trust.refresh()
    if fault == "status":
        fleet.failing = 502
    elif fault == "garbage":
        fleet.keys = [{"kid": "x"}]
    elif fault == "nested":
        fleet.nested = True
    elif fault == "no keys":
        fleet.keys = []
    for gateway in settings.values():
        if fault == "gone":
            await gateway.trust.close()
            gateway.trust = FleetTrust(FleetIdentityConfig(url="http://127.0.0.1:1", tenants=("stores",)))
        await gateway.trust.refresh()
        assert gateway.trust.last_error
        await gateway.trust.close()
        assert gateway.device(fleet.token()) == "kiosk-1"
        gateway.now += 61
    assert settings["allow"].device(fleet.token()) == "kiosk-1"
    assert settings["allow"].revocations.stale_accepts == 1
    with pytest.raises(IdentityUnavailable):
        settings["deny"].device(fleet.token())
    with pytest.raises(AuthenticationFailed, match="revoked"):
        settings["allow"].device(fleet.token("kiosk-9", now=time.time() - 60))


async def test_a_restart_without_the_control_plane_uses_the_copy(fleet: ScriptedFleet, tmp_path: Path) -> None:
    first = Gateway(config(fleet, tmp_path))
    fleet.revoke("kiosk-9")
    await first.trust.refresh()
    await first.trust.close()
    fleet.failing = 503
    second = Gateway(config(fleet, tmp_path))
    await second.trust.refresh()
    assert second.device(fleet.token()) == "kiosk-1"
    with pytest.raises(AuthenticationFailed, match="revoked"):
        second.device(fleet.token("kiosk-9", now=time.time() - 60))
    await second.trust.close()


async def test_a_start_without_copy_and_control_plane_is_503_not_401(fleet: ScriptedFleet, tmp_path: Path) -> None:
    """A device whose token is fine must not be told that it is refused. A damaged copy is none."""
    (tmp_path / "fleet.json").write_text("{")
    fleet.failing = 503
    gateway = Gateway(config(fleet, tmp_path))
    await gateway.trust.refresh()
    with pytest.raises(IdentityUnavailable):
        gateway.device(fleet.token())
    fleet.failing = 0
    await gateway.trust.refresh()
    assert gateway.device(fleet.token()) == "kiosk-1"
    with pytest.raises(AuthenticationFailed, match="key"):
        gateway.device(ScriptedFleet().token())
    await gateway.trust.close()


async def test_an_older_backup_of_the_control_plane_withdraws_nothing(fleet: ScriptedFleet) -> None:
    gateway = Gateway(config(fleet))
    before = fleet.revocations
    fleet.revoke("kiosk-1")
    await gateway.trust.refresh()
    fleet.revocations = before
    await gateway.trust.refresh()
    with pytest.raises(AuthenticationFailed, match="revoked"):
        gateway.device(fleet.token(now=time.time() - 5))
    await gateway.trust.close()


async def test_keys_of_file_and_fleet_are_accepted_side_by_side(fleet: ScriptedFleet, tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    gateway = Gateway(config(fleet, key_file=str(issuer.key_file)))
    await gateway.trust.refresh()
    now = time.time()
    own = issuer.sign({"iat": now, "nbf": now, "exp": now + 60, "scope": "admin"})
    assert gateway.device(own) == "kiosk-17"
    assert gateway.device(fleet.token()) == "kiosk-1"
    await gateway.trust.close()


async def test_the_fleets_keys_make_no_operators(fleet: ScriptedFleet) -> None:
    gateway = Gateway(config(fleet))
    await gateway.trust.refresh()
    with pytest.raises(AuthenticationFailed, match="admin"):
        gateway.device(fleet.token(scopes=("chat", "admin")))
    await gateway.trust.close()


async def test_a_fleet_uses_the_tenants_that_the_gateway_names(fleet: ScriptedFleet) -> None:
    """Its operators choose each device's tenant: they cannot spend the budget of another one."""
    gateway = Gateway(config(fleet))
    await gateway.trust.refresh()
    with pytest.raises(PermissionDenied, match=r"'acme' on this gateway.*identity\.fleet\.tenants"):
        gateway.device(fleet.token(tenant="acme"))
    assert gateway.device(fleet.token()) == "kiosk-1"
    await gateway.trust.close()


async def test_a_fleet_revokes_the_devices_of_its_tenants_alone(fleet: ScriptedFleet) -> None:
    """Also where another authority's keys sign the tokens of the other tenants."""
    gateway = Gateway(config(fleet))
    now = time.time()
    devices = {"acme/till-1": now, "stores/kiosk-1": now}
    fleet.revocations = msgspec.structs.replace(fleet.revocations, version=7, devices=devices)
    await gateway.trust.refresh()
    gateway.revocations.check("acme/till-1", "another", now - 5.0)
    with pytest.raises(AuthenticationFailed, match="revoked"):
        gateway.revocations.check("stores/kiosk-1", "another", now - 5.0)
    await gateway.trust.close()


def test_a_fleet_without_tenants_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("tiers: [{name: large}]\nidentity: {fleet: {url: 'https://fleet.example'}}\n")
    with pytest.raises(ConfigError, match=r"List the tenants"):
        load_config(path, Flags())


@pytest.mark.parametrize("url", ["http://fleet.example", "ftp://fleet.example", "fleet.example", "https://"])
def test_an_address_whose_keys_could_be_forged_is_refused(tmp_path: Path, url: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"tiers: [{{name: large}}]\nidentity: {{fleet: {{url: '{url}'}}}}\n")
    with pytest.raises(ConfigError, match=r"identity\.fleet\.url|gateway\.yaml"):
        load_config(path, Flags())


async def test_over_http(fleet: ScriptedFleet) -> None:
    """A gateway on real sockets: the token is accepted, and refused after the device was revoked."""
    identity = IdentityConfig(fleet=FleetIdentityConfig(url=fleet.url, refresh_s=0.05, tenants=("stores",)))
    async with running(Config(identity=identity, tiers=(unreachable_tier("assistant-large"),))) as gateway:
        token = fleet.token(now=time.time() - 5)
        assert (await gateway.post(token))[0] == 200
        fleet.revoke("kiosk-1")
        with anyio.fail_after(60):
            while (await gateway.post(token))[0] != 401:  # noqa: ASYNC110 -- the poll has no event
                await anyio.sleep(0.02)
        assert "causeway_gateway_fleet_unreachable 0.0" in gateway.metrics()
