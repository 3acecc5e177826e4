"""The operators' address: metrics, readiness in detail and operators' calls, which the public address does not have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest

from causeway_server.cloud_pool.accounts.identity.authenticator import OPERATOR_TOKEN_FILE
from causeway_server.cloud_pool.accounts.identity.issuing import issue
from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.config import Config, Flags, load_config
from causeway_server.cloud_pool.http.config import OperatorConfig, ServerConfig
from causeway_server.router.errors import ConfigError
from tests.cloud_pool.accounts.identity.token_issuer import Issuer

from ..unreachable import unreachable_tier

PATIENCE_S = 60.0
PUBLIC = {"/healthz": 200, "/health": 200, "/readyz": 503, "/metrics": 404, "/reload": 404, "/drain": 404}
OPERATORS = {"/readyz": 503, "/metrics": 200, "/reload": 404, "/drain": 405, "/healthz": 404, "/v1/models": 404}


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path)


def local(state_dir: Path) -> dict[str, str]:
    """The token that a gateway made at start."""
    return {"authorization": f"Bearer {(state_dir / OPERATOR_TOKEN_FILE).read_text().strip()}"}


@asynccontextmanager
async def serving(
    reread: Callable[[], Config] | None = None, **settings: Any
) -> AsyncIterator[tuple[App, aiohttp.ClientSession]]:
    config = Config(**{"server": ServerConfig(port=0), "tiers": (unreachable_tier(),), **settings})
    async with anyio.create_task_group() as tasks:
        app = build(config, tasks, reread)
        await app.start()
        with anyio.fail_after(PATIENCE_S):
            async with aiohttp.ClientSession() as session:
                yield app, session
        await app.stop()
    await app.close()


def token(by: Issuer, *scopes: str) -> str:
    return issue(
        by.key,
        tenant="acme",
        device="operator",
        scopes=scopes,
        issuer="causeway",
        audience="causeway-cloud",
        now=time.time(),
        lifetime_s=600.0,
    )[0]


async def test_the_public_address_has_health_and_a_bare_readiness_only() -> None:
    async with serving() as (app, http):
        for path, status in PUBLIC.items():
            async with http.get(app.url.removesuffix("/v1") + path) as answer:
                body = await answer.read()
                assert answer.status == status, path
                assert path != "/readyz" or body == b'{"ready":false}'
        async with http.post(app.url.removesuffix("/v1") + "/drain") as answer:
            assert answer.status == 404


async def test_on_loopback_probes_need_no_token_and_all_else_does(tmp_path: Path) -> None:
    """Any page of a browser and any account of the machine can send a request to loopback."""
    async with serving(state_dir=str(tmp_path)) as (app, http):
        assert app.operator_url.startswith("http://127.0.0.1:")
        for path, status in OPERATORS.items():
            async with http.get(app.operator_url + path) as answer:
                assert answer.status == (status if path in ("/readyz", "/metrics") else 401), path
            async with http.get(app.operator_url + path, headers=local(tmp_path)) as answer:
                assert answer.status == status, path
        for method, path in (("POST", "/drain"), ("POST", "/metrics"), ("GET", "/dlq"), ("DELETE", "/dlq/job_1")):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}):
                async with http.request(method, app.operator_url + path, headers=headers) as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (401, "invalid_api_key")
        async with http.get(f"{app.operator_url}/readyz") as answer:
            found = await answer.json()
        assert found["tiers"]["large"]["endpoints"] == {"127.0.0.1:1": "cloud_unreachable"}
        assert not found["draining"]
        async with http.get(f"{app.operator_url}/metrics") as answer:
            assert "causeway_gateway_requests_total" in await answer.text()


async def test_head_and_a_slash_too_many_are_served_as_get(tmp_path: Path) -> None:
    """A probe needs no token for them either, and a call that changes something is no HEAD."""
    async with serving(state_dir=str(tmp_path)) as (app, http):
        async with http.head(f"{app.operator_url}/metrics/") as head:
            assert (head.status, await head.read()) == (200, b"")
        async with http.head(f"{app.operator_url}/drain") as head:
            assert head.status == 401
        async with http.head(f"{app.operator_url}/drain", headers=local(tmp_path)) as head:
            assert (head.status, head.headers["allow"]) == (405, "POST")
        async with http.head(f"{app.url}/models/") as head, http.get(f"{app.url}/models") as whole:
            assert (head.status, head.headers["content-length"]) == (200, whole.headers["content-length"])
            assert await head.read() == b""
        async with http.post(f"{app.operator_url}//drain/", headers=local(tmp_path)) as answer:
            assert (answer.status, answer.history) == (200, ())


async def test_operators_show_a_token_of_theirs(issuer: Issuer, tmp_path: Path) -> None:
    """A static one of the operators' file, or a signed one with the scope admin; no caller's token will do."""
    (tmp_path / "operators").write_text("prometheus scrape-secret\n")
    (tmp_path / "devices").write_text("kiosk device-secret\n")
    settings: dict[str, Any] = {
        "server": ServerConfig(port=0, token_file=str(tmp_path / "devices")),
        "operator": OperatorConfig(token_file=str(tmp_path / "operators")),
        "identity": issuer.config,
    }
    async with serving(**settings) as (app, http):
        for shown, status in (
            ("", 401),
            ("device-secret", 401),
            (token(issuer, "chat", "jobs"), 403),
            (token(issuer, "admin"), 200),
            ("scrape-secret", 200),
        ):
            headers = {"authorization": f"Bearer {shown}"} if shown else {}
            async with http.get(f"{app.operator_url}/metrics", headers=headers) as answer:
                assert answer.status == status, shown
                assert status != 401 or answer.headers["www-authenticate"] == "Bearer"
        headers = {"authorization": "Bearer scrape-secret"}
        async with http.get(f"{app.url}/models", headers=headers) as answer:
            assert answer.status == 401


async def test_with_identity_alone_the_scope_admin_is_needed(issuer: Issuer) -> None:
    async with serving(identity=issuer.config) as (app, http):
        for shown, status in ((None, 401), (token(issuer, "chat"), 403), (token(issuer, "chat", "admin"), 200)):
            headers = {} if shown is None else {"authorization": f"Bearer {shown}"}
            async with http.post(f"{app.operator_url}/drain", headers=headers) as answer:
                assert answer.status == status


async def test_the_token_is_kept_and_its_file_is_for_its_owner_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says where it is: a configuration from before tokens has none."""
    folder, found = tmp_path / "state", []
    for _ in range(2):
        with caplog.at_level("INFO"):
            async with serving(state_dir=str(folder)):
                found.append((folder / OPERATOR_TOKEN_FILE).read_text())
        assert (folder.stat().st_mode & 0o777, (folder / OPERATOR_TOKEN_FILE).stat().st_mode & 0o777) == (0o700, 0o600)
        assert str(folder / OPERATOR_TOKEN_FILE) in caplog.text
        assert found[0].strip() not in caplog.text
        (folder / OPERATOR_TOKEN_FILE).chmod(0o644)
    assert found[0] == found[1]
    assert [path.name for path in folder.iterdir()] == [OPERATOR_TOKEN_FILE]


@pytest.mark.parametrize("obstacle", ["no folder", "a file", "a link"])
async def test_where_no_token_can_be_kept_operators_calls_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    """A probe still gets its answer, and the log says what to do."""
    folder = tmp_path / "state"
    if obstacle == "a file":
        folder.touch()
    elif obstacle == "a link":
        folder.mkdir()
        (tmp_path / "elsewhere").write_text("a token that another account knows\n")
        (folder / OPERATOR_TOKEN_FILE).symlink_to(tmp_path / "elsewhere")
    async with serving(state_dir="" if obstacle == "no folder" else str(folder)) as (app, http):
        assert "operator.token_file" in caplog.text
        for shown in ("", "a token that another account knows"):
            async with http.post(f"{app.operator_url}/drain", headers={"authorization": f"Bearer {shown}"}) as answer:
                assert answer.status == 401
        async with http.get(f"{app.operator_url}/metrics") as answer:
            assert answer.status == 200


async def test_an_empty_token_file_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / OPERATOR_TOKEN_FILE).touch()
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ConfigError, match=OPERATOR_TOKEN_FILE):
            build(Config(state_dir=str(tmp_path), tiers=(unreachable_tier(),)), tasks)


async def test_no_page_uses_the_operators_address(tmp_path: Path) -> None:
    """Not under a rebound name, which would read the endpoints, and not with a token that it came by."""
    async with serving(state_dir=str(tmp_path)) as (app, http):
        for path in ("/readyz", "/metrics"):
            async with http.get(app.operator_url + path, headers={"host": "evil.example:8190"}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (421, "misdirected_request")
        for page in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            async with http.post(f"{app.operator_url}/drain", headers=local(tmp_path) | page) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (403, "origin_not_allowed")
        async with http.get(f"{app.operator_url}/readyz") as answer:
            assert not (await answer.json())["draining"]


def test_the_token_is_in_the_accounts_state_folder(tmp_path: Path) -> None:
    def folder(**environ: str) -> str:
        return load_config(None, Flags(), environ).state_dir

    assert folder(STATE_DIRECTORY="/var/lib/causeway:/b", HOME="/home/a") == "/var/lib/causeway"
    assert folder(XDG_STATE_HOME="/x", HOME="/home/a") == "/x/causeway-cloud"
    assert folder(HOME="/home/a") == "/home/a/.local/state/causeway-cloud"
    assert folder() == ""
    (tmp_path / "gateway.yaml").write_text("state_dir: state")
    assert load_config(tmp_path / "gateway.yaml", Flags(), {}).state_dir == str(tmp_path / "state")


async def test_an_operator_drains_a_gateway(tmp_path: Path) -> None:
    """It refuses new requests, and the public readiness says so; the process goes on."""
    async with serving(state_dir=str(tmp_path)) as (app, http):
        async with http.post(f"{app.operator_url}/drain", headers=local(tmp_path)) as answer:
            assert await answer.json() == {"draining": True}
        body = {"model": "large", "messages": [{"role": "user", "content": "hello"}]}
        async with http.post(f"{app.url}/chat/completions", json=body) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "draining")
        async with http.get(f"{app.operator_url}/readyz") as answer:
            assert (answer.status, (await answer.json())["draining"]) == (503, True)


async def test_an_operator_reloads_the_endpoints(tmp_path: Path) -> None:
    """A faulty file is a 400 that says why, and changes nothing."""
    tier = unreachable_tier()
    files: list[Config | ConfigError] = [
        ConfigError("no such key", where="gateway.yaml:3"),
        Config(tiers=(msgspec.structs.replace(tier, triton="127.0.0.1:2"),)),
    ]

    def reread() -> Config:
        found = files.pop(0)
        if isinstance(found, ConfigError):
            raise found
        return found

    async def endpoints(app: App, http: aiohttp.ClientSession) -> set[str]:
        async with http.get(f"{app.operator_url}/readyz") as answer:
            return set((await answer.json())["tiers"]["large"]["endpoints"])

    settings: dict[str, Any] = {"server": ServerConfig(port=0, readiness_cache_s=0), "state_dir": str(tmp_path)}
    async with serving(reread, **settings) as (app, http):
        async with http.post(f"{app.operator_url}/reload", headers=local(tmp_path)) as answer:
            assert (answer.status, "gateway.yaml:3" in await answer.text()) == (400, True)
        assert await endpoints(app, http) == {"127.0.0.1:1"}
        async with http.post(f"{app.operator_url}/reload", headers=local(tmp_path)) as answer:
            assert answer.status == 200
        while await endpoints(app, http) != {"127.0.0.1:2"}:  # noqa: ASYNC110 -- applied by a background task
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("operator: {host: 0.0.0.0}", "operator.token_file"),
        ("server: {port: 65500}", "operator.port"),
        ("operator: {token_file: nowhere}", "nowhere"),
    ],
)
async def test_an_open_or_impossible_operators_address_is_a_config_error(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ConfigError, match=where):
            build(load_config(path, Flags(tiers=("assistant-large",))), tasks)


def test_the_operators_port_is_100_above_the_gateways() -> None:
    def port(flags: Flags) -> int:
        return load_config(None, flags).operator_server.port

    assert [port(Flags()), port(Flags(port=8000)), port(Flags(port=0)), port(Flags(operator_port=9))] == [
        8190,
        8100,
        0,
        9,
    ]


async def test_a_taken_port_names_the_key() -> None:
    async with serving() as (app, _):
        taken = int(app.operator_url.rpartition(":")[2])
        config = Config(server=ServerConfig(port=0), operator=OperatorConfig(port=taken), tiers=(unreachable_tier(),))
        async with anyio.create_task_group() as tasks:
            other = build(config, tasks)
            with pytest.raises(ConfigError, match=r"operator\.port"):
                await other.start()
            tasks.cancel_scope.cancel()
        await other.close()
