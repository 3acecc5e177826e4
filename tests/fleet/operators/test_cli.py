"""The operators' commands against a real control plane, in a process of its own."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import click
import pytest

from causeway_server.fleet.cli.commands import main
from tests.fleet.repository.fleets import edit
from tests.fleet.server.device import Device

from .conftest import operated_fleet
from .process import Process, until

pytestmark = pytest.mark.slow


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    one = Process(operated_fleet(tmp_path))
    yield one
    one.kill(signal.SIGTERM)


def test_apply_says_what_will_change_and_asks(process: Process) -> None:
    folder = str(process.signed.path)
    code, output = process.at_terminal("apply", folder, "--cohort", "kiosk", keys="n\n")
    assert (code, "Begin 1 rollout at retail?" in output, "Nothing was changed" in output) == (1, True, True)
    assert "kiosk: serial 1 on 0 devices\n  first bundle: policy, 1 case file, 1 model, 3 settings" in output
    assert "stages: 50 %, 100 %; the first is 0 of 0 devices" in output
    assert re.search(r"^kiosk +0 +0$", process.done("status"), re.MULTILINE)
    begun = process.done("apply", folder, "--cohort", "kiosk", "--yes")
    name = re.search(r"rollout (r-\S+) has begun", begun)
    assert name is not None
    until(lambda: re.search(" replay paused, 0 %: 0 recorded requests of 0 devices", process.done("status", name[1])))
    assert "the role approver" in process.run("accept", "kiosk", as_="olga").output
    process.done("accept", "kiosk")
    until(lambda: re.search(" stage 1 of 2,", process.done("status", name[1])))
    again = process.done("apply", folder, "--cohort", "kiosk", "--yes")
    assert again == f"kiosk: {name[1]} is under way already (stage 1 of 2)\n"
    early = process.run("accept", "kiosk")
    assert (early.exit_code, "does not allow accept. Allowed: pause, abort" in early.output) == (1, True)
    paused = process.done("pause", "kiosk", "--reason", "lunch", as_="olga")
    assert "stage 1 of 2 paused, 50 %: by olga: lunch" in paused
    assert "the role approver" in process.run("accept", "kiosk", as_="olga").output
    assert "stage 2 of 2, 100 %: by april" in process.done("accept", "kiosk")
    _signed_again(process)
    other = process.run("apply", folder, "--cohort", "kiosk", "--yes")
    assert (other.exit_code, "of another bundle is under way (stage 2 of 2)" in other.output) == (1, True)
    scripted = process.run("abort", name[1])
    assert (scripted.exit_code, "Nothing was changed: there is no terminal" in scripted.output) == (2, True)
    code, output = process.at_terminal("abort", "kiosk", keys="n\n")
    assert (code, f"Abort {name[1]}?" in output, "Nothing was changed" in output) == (1, True, True)
    assert "devices that run the bundle of this rollout keep it; an aborted rollout cannot continue" in output
    assert "note: the cohort has no earlier bundle" in process.done("abort", name[1], "--yes")
    until(lambda: re.search(" revert", process.done("status", "kiosk")))
    detail = process.done("status", name[1])
    assert "april rollout.abort" in detail
    assert "devices in the share: none" in detail
    assert re.search(rf"^{name[1]}  kiosk +[0-9a-f]{{12}} +revert", process.done("status"), re.MULTILINE)


def _signed_again(process: Process) -> None:
    edit(process.signed.path / "fleet.yaml", "engine.threads: 4", "engine.threads: 3")
    process.signed.sign("anna", "ben")


def test_what_is_not_signed_is_not_applied(process: Process) -> None:
    edit(process.signed.path / "policies" / "kiosk.yaml", "device", "on-device")
    edit(process.signed.path / "policies" / "cases" / "kiosk.yaml", "route: device", "route: on-device")
    result = process.run("apply", str(process.signed.path), "--yes")
    assert result.exit_code == 1
    assert "kiosk: the files in the folder differ from the signed bundle. Run `causeway-fleet sign`." in result.output


ASKS = {"abort", "apply", "erase", "revoke"}
HARMLESS = {
    "they only read": {
        "audit proof",
        "devices",
        "diff",
        "lint",
        "prove",
        "replay",
        "route",
        "schema",
        "status",
        "test",
    },
    "they refuse to overwrite a file, or keep a copy": {"init", "keys new", "migrate", "tls init"},
    "it keeps the newest heads of the logs that it has compared": {"audit egress"},
    "it deletes nothing, and the next start undoes it": {"downgrade"},
    "another command undoes them": {"hold", "pause", "pin", "release", "resume"},
    "what they begin or make can be ended: `abort`, `revoke`, the token's expiry": {"accept", "enroll", "quick"},
    "they need a private key, and only add what is newer": {"keys holders", "keys list", "serve", "sign"},
}


def test_every_command_asks_or_is_harmless() -> None:
    """A new command has to be listed here: does it change what cannot be changed back?"""
    commands: dict[str, click.Command] = {}
    for name, command in main.commands.items():
        inner = command.commands if isinstance(command, click.Group) else {"": command}
        commands |= {f"{name} {part}".strip(): one for part, one in inner.items()}
    assert {name for name, one in commands.items() if any("--yes" in option.opts for option in one.params)} == ASKS
    assert sorted(commands) == sorted(ASKS.union(*HARMLESS.values()))


async def test_revoking_says_what_it_does_and_asks(process: Process) -> None:
    token = (await asyncio.to_thread(process.done, "enroll", "--cohort", "kiosk")).split()[0]
    async with aiohttp.ClientSession() as http:
        device = Device(http, process.url, "till-1")
        assert (await device.enrol(token)).status == 200
        scripted = await asyncio.to_thread(process.run, "revoke", "till-1")
        assert scripted.exit_code == 2
        assert "Nothing was changed: there is no terminal to ask at; --yes answers the question" in scripted.output
        for keys in ("n\n", "\x04"):
            code, output = await asyncio.to_thread(process.at_terminal, "revoke", "till-1", keys=keys)
            assert (code, "Nothing was changed" in output) == (1, True)
            assert "the control plane and the cloud gateways refuse till-1" in output
        assert (await device.ask_token()).status == 200
        code, output = await asyncio.to_thread(process.at_terminal, "revoke", "till-1", keys="y\n")
        assert (code, output.endswith("till-1 is revoked.\n")) == (0, True)
        assert (await device.ask_token()).code == "device_revoked"
    again = await asyncio.to_thread(process.done, "revoke", "till-1")
    assert "till-1 was already revoked at 20" in again
    assert "Device till-2 not found." in (await asyncio.to_thread(process.run, "revoke", "till-2", "--yes")).output
    assert (await asyncio.to_thread(process.done, "audit")).count("device.revoke ") == 1


def test_devices_tokens_and_the_log(process: Process) -> None:
    token = process.done("enroll", "--cohort", "kiosk", "--uses", "2", "--label", "site=7")
    assert token.startswith("cwjoin_")
    assert process.done("devices") == "No device has joined.\n"
    assert process.done("devices", "--state", "trial") == "There is no such device.\n"
    assert "no bundles of the newest rollouts begin with 'ab'" in process.run("pin", "device-9", "ab").output
    assert "Device device-9 not found." in process.run("hold", "device-9").output
    assert "NAME=VALUE" in process.run("enroll", "--label", "site").output
    assert re.search(
        r'^    1  \S+ \S+Z  april join_token.new  cohort=kiosk .* labels=\{"site":"7"\} .*uses=2$',
        process.done("audit"),
        re.MULTILINE,
    )
    verified = process.done("audit", "--verify")
    head = re.search(r"1 row, the chain holds; the last hash is (\w+)", verified)
    assert head is not None
    process.done("enroll")
    assert "2 rows" in process.done("audit", "--verify", "--head", head[1])
    assert "truncated" in process.run("audit", "--verify", "--head", "0" * 64).output


def test_a_wrong_token_and_a_control_plane_that_is_away(process: Process) -> None:
    assert "answered 401: The token or session is unknown" in process.run("status", as_="mallory").output
    assert process.run("status", as_="").exit_code == 2
    process.kill()
    result = process.run("status")
    assert (result.exit_code, "does not answer" in result.output) == (1, True)
    process.start()
    assert "kiosk" in process.done("status")


def test_sigterm_ends_the_process_soon(process: Process) -> None:
    process.kill(signal.SIGTERM)
    process.start()
