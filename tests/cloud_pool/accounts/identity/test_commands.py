"""`causeway-cloud keys`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis.asyncio
from click.testing import CliRunner, Result

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.identity.key_set import read_jwks
from causeway_server.cloud_pool.accounts.identity.revocation import RevocationList
from causeway_server.cloud_pool.accounts.identity.token_verifier import KeySet, TokenVerifier
from causeway_server.cloud_pool.cli.keys import keys
from causeway_server.router.errors import AuthenticationFailed
from tests.redis_server import RedisServer


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(keys, [str(arg) for arg in args], env={"COLUMNS": "200"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert run("new", "--private", tmp_path / "a.pem", "--keys", tmp_path / "keys.json").exit_code == 0
    return tmp_path


def issued(folder: Path, *args: str) -> str:
    result = run("issue", "--private", folder / "a.pem", "--tenant", "acme", "--device", "kiosk", *args)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_issued_tokens_verify_and_stand_alone_on_stdout(folder: Path) -> None:
    token = issued(folder)
    verifier = TokenVerifier(IdentityConfig(), KeySet(folder / "keys.json"))
    claims = verifier.verify(token, now=0.0, now_unix=time.time())
    assert claims.owner == "acme/kiosk"
    assert claims.principal().scopes == {"chat", "jobs"}


def test_scopes_and_lifetime_are_set_and_checked(folder: Path) -> None:
    claims = TokenVerifier(IdentityConfig(), KeySet(folder / "keys.json")).verify(
        issued(folder, "--scope", "chat", "--lifetime-s", "86400"), now=0.0, now_unix=time.time()
    )
    assert claims.scope == "chat"
    assert claims.exp - claims.iat == 86400
    spaced = run("issue", "--private", folder / "a.pem", "--tenant", "a b", "--device", "x")
    assert spaced.exit_code == 2
    assert "1 to 64 letters, digits" in spaced.output
    assert (
        run("issue", "--private", folder / "a.pem", "--tenant", "a", "--device", "x", "--lifetime-s", "0").exit_code
        == 2
    )
    assert run("issue", "--private", folder / "none.pem", "--tenant", "a", "--device", "x").exit_code == 2


def test_show_prints_keys_and_unverified_claims(folder: Path) -> None:
    kid = read_jwks(folder / "keys.json").keys[0].kid
    shown = run("show", "--keys", folder / "keys.json")
    assert kid in shown.output
    shown = run("show", issued(folder))
    assert "acme" in shown.output
    assert "not verified" in shown.output
    assert run("show", "rubbish").exit_code == 2


@pytest.mark.redis
async def test_revoke_and_show_tokens_and_devices(folder: Path, empty_redis: RedisServer) -> None:
    token = issued(folder)
    verifier = TokenVerifier(IdentityConfig(), KeySet(folder / "keys.json"))
    claims = verifier.verify(token, now=0.0, now_unix=time.time())
    # The command starts an event loop of its own.
    import anyio.to_thread

    async def run_on_thread(*args: str) -> Result:
        return await anyio.to_thread.run_sync(lambda: run(*args))

    for what in (("--token-id", claims.jti), ("--device", claims.owner)):
        empty_redis.flush()
        result = await run_on_thread("revoke", "--redis", empty_redis.url, *what)
        assert result.exit_code == 0, result.output
        assert f"{what[1]}" in result.stdout
        assert "Gateways refuse" in result.stdout
        async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
            revoked = RevocationList(IdentityConfig(), client)
            await revoked.refresh()
        with pytest.raises(AuthenticationFailed, match="revoked"):
            revoked.check(claims.owner, claims.jti, claims.iat)
        assert what[1] in (await run_on_thread("show", "--redis", empty_redis.url)).output


def test_incomplete_revocations_exit_with_status_2(folder: Path) -> None:
    url = "redis://127.0.0.1:1/0"
    for args in (
        (),
        ("--token-id", "a", "--device", "a/b", "--redis", url),
        ("--device", "b", "--redis", url),
        ("--token-id", "a"),
        ("--token-id", "a", "--redis", url),
        ("--key", "x"),
        ("--key", "x", "--keys", str(folder / "keys.json")),
    ):
        result = run("revoke", *args)
        assert result.exit_code == 2, (args, result.output)


def test_a_key_is_revoked_whatever_is_wrong_with_the_configuration_of_redis(folder: Path) -> None:
    """A compromised key is closed in its file; a token is shown from itself."""
    old = read_jwks(folder / "keys.json").keys[0].kid
    assert run("new", "--private", folder / "b.pem", "--keys", folder / "keys.json").exit_code == 0
    token = issued(folder)
    for args in (("revoke", "--key", old, "--keys", folder / "keys.json"), ("show", token)):
        result = run(*args, "--redis", "redis.internal:6379")
        assert result.exit_code == 0, result.output
    assert run("show", "--redis", "redis.internal:6379").exit_code == 2


def test_revoking_a_key_removes_it_from_the_set(folder: Path) -> None:
    old = read_jwks(folder / "keys.json").keys[0].kid
    assert run("new", "--private", folder / "b.pem", "--keys", folder / "keys.json").exit_code == 0
    result = run("revoke", "--key", old, "--keys", folder / "keys.json")
    assert result.exit_code == 0
    assert f"Removed the key {old} from {folder / 'keys.json'}. Keys left in the file: 1." in result.stdout
    assert old not in {key.kid for key in read_jwks(folder / "keys.json").keys}
