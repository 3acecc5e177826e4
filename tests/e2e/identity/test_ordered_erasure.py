"""An operator orders a device to erase: the real control plane, and the device's connection to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from causeway_server.edge_node.agent.link.identity import JoinRequest, join
from causeway_server.edge_node.agent.link.orders import OrderRefused, carry_out
from causeway_server.edge_node.agent.verifier import UpdateVerifier
from causeway_server.fleet.cli.commands import main
from causeway_server.fleet.store.devices import read_device
from causeway_server.fleet.trust.offline import signed_manifests
from causeway_server.router.bundle.manifest import bundle_id
from causeway_server.router.bundle.protocol import SignedOrder
from tests.fleet.operators.conftest import Server, operated_fleet, serving
from tests.own_task import in_own_task

from .test_device import Device, eventually

pytestmark = pytest.mark.slow
NAME = "kiosk-1"
PATH = f"/v1/devices/{NAME}"


async def joined(server: Server, folder: Path) -> Device:
    """A device that has verified the fleet's metadata once."""
    token = (await server.post("/v1/join-tokens", {"cohort": "kiosk"}))["token"]
    identity = await join(folder, JoinRequest(url=server.url, token=token, name=NAME), time.time())
    refused = await server.ask("POST", f"{PATH}/erase", {})
    assert (refused.status, refused.code) == (409, "wrong_state"), "nothing is published"
    bundle = bundle_id(signed_manifests(server.signed.published)["kiosk"])
    made = await server.post("/v1/rollouts", {"cohort": "kiosk", "to_bundle": bundle, "without_replay": True})
    while (await server.get(f"/v1/rollouts/{made['id']}"))["state"] != "stage":  # noqa: ASYNC110
        await asyncio.sleep(0.02)

    def fetch(path: str) -> Iterator[bytes]:
        answer = httpx.get(f"{server.url}/{path}", trust_env=False)
        if answer.status_code == 404:
            raise FileNotFoundError(path)
        yield answer.content

    while (await server.ask("GET", "/tuf/metadata/timestamp.json")).status == 404:  # noqa: ASYNC110
        await asyncio.sleep(0.02)  # a stage begins before its metadata are published
    device = Device(folder / "fleet")
    verifier = UpdateVerifier(device.folder / "tuf", identity.root.encode(), fetch, time.monotonic)
    await asyncio.to_thread(verifier.refresh)
    return device


async def test_a_device_erases_once_and_the_control_plane_gets_the_receipt(tmp_path: Path) -> None:
    """Also if it was off when it was ordered, and if its receipt was lost; of a forged order it does nothing."""
    async with in_own_task(serving(operated_fleet(tmp_path))) as server:
        device = await joined(server, tmp_path / "device")
        erased: list[str] = []

        async def erase(client: str) -> str:
            erased.append(client)
            return f"receipt.of.{client}"

        async def receipt() -> str:
            return str((await server.get(PATH))["erasure"]["receipt"])

        async def order() -> SignedOrder:
            async with server.plane.store.read() as connection:
                row = await read_device(connection, NAME)
            assert row is not None
            assert row.erasure is not None
            return row.erasure.signed

        device.link.erase = erase
        assert (await server.ask("POST", f"{PATH}/erase", {}, as_="vera")).code == "permission_denied"
        assert (await server.ask("POST", f"{PATH}/erase", {"client": ""}, as_="olga")).status == 400
        await server.post(f"{PATH}/erase", {"reason": "returned"}, as_="olga")
        first = await order()
        await server.post(f"{PATH}/erase", {}, as_="olga")
        waiting = await server.ask("POST", f"{PATH}/erase", {"client": "till"}, as_="olga")
        assert (waiting.status, "has not carried out the erasure order for all clients" in str(waiting)) == (409, True)
        assert await order() == first, "the open order stays"
        assert (await server.get(PATH))["erasure"]["finished"] is None
        async with device.running():
            await eventually(lambda: erased == [""])
            while not await receipt():
                await device.time.pass_s(31)
            assert (await receipt(), (await server.get(PATH))["history"]) == ("receipt.of.", [])
            await server.post(f"{PATH}/erase", {"client": "till"})
            while await receipt() != "receipt.of.till":
                await device.time.pass_s(31)
        assert erased == ["", "till"]
        last = await order()
        again = await carry_out(device.folder, last, NAME, erase)
        assert again is not None
        assert again.receipt == "receipt.of.till"
        assert await carry_out(device.folder, first, NAME, erase) is None, "an old order"
        forged = last.order.replace("till", "all")
        for other in (
            msgspec.structs.replace(last, order=forged),
            msgspec.structs.replace(last, key="0" * 64),
            msgspec.structs.replace(last, signature="zz"),
        ):
            with pytest.raises(OrderRefused):
                await carry_out(device.folder, other, NAME, erase)
        with pytest.raises(OrderRefused, match=f"The order is for the device {NAME}"):
            await carry_out(device.folder, last, "kiosk-2", erase)
        assert erased == ["", "till"]
        await _check_command(server)


async def _check_command(server: Server) -> None:
    """The command prints the last receipt; of an order that a device does not carry out it says so."""
    from click.testing import CliRunner

    def run(*arguments: str) -> tuple[int, str]:
        env = {"CAUSEWAY_FLEET_URL": server.url, "CAUSEWAY_FLEET_TOKEN": "april"}
        result = CliRunner().invoke(main, ["erase", NAME, *arguments], env=env)
        return result.exit_code, result.output

    assert await asyncio.to_thread(run, "--status") == (0, "receipt.of.till\n")
    for arguments, code, words in (
        (("--client", "office"), 2, "Nothing was changed: there is no terminal"),
        (
            ("--client", "office", "--yes", "--wait", "100ms"),
            1,
            f"{NAME} has not erased the data yet. Ask again with --status.",
        ),
        (("--status",), 1, "has not erased the data yet"),
        (("--client", "", "--yes"), 2, "The name of the client is empty."),
        (("--wait", "soon"), 2, "Expected a time such as 30s or 5m"),
    ):
        found = await asyncio.to_thread(run, *arguments)
        assert (found[0], words in found[1]) == (code, True), found
