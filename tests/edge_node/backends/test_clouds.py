"""A device with three clouds on real sockets: order, failover before the first byte, and each cloud's own state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from causeway_server.edge_node.config.schema import CloudServer
from tests.waiting import until

from ..device import POLICY, Device, running
from ..scripted import FAULTS, Fault, ScriptedCloud

NAMES = ("eu", "us", "ap")
IN_ORDER = POLICY.replace("at: cloud\n", "at: [cloud:eu, cloud:us, cloud:ap]\n").replace(
    "first_token_timeout: 20s\n    timeout: 25s", "first_token_timeout: 300ms\n    timeout: 500ms"
)


class ThreeClouds:
    """The device, and its clouds by name."""

    def __init__(self, device: Device, clouds: dict[str, ScriptedCloud]) -> None:
        self.device = device
        self.clouds = clouds

    @property
    def asked(self) -> dict[str, int]:
        return {name: len(cloud.bodies) for name, cloud in self.clouds.items() if cloud.bodies}

    async def probe(self) -> None:
        for cloud in self.device.parts.clouds:
            await cloud.probe()


@asynccontextmanager
async def three_clouds(
    folder: Path, policy: str = IN_ORDER, names: tuple[str, ...] = NAMES, probe_interval_s: float = 5.0
) -> AsyncIterator[ThreeClouds]:
    clouds = {name: await ScriptedCloud().start() for name in names}
    listed = {name: CloudServer(url=cloud.url, key=f"key-{name}", region=name) for name, cloud in clouds.items()}
    try:
        async with running(folder, policy=policy, clouds=listed, probe_interval_s=probe_interval_s) as device:
            yield ThreeClouds(device, clouds)
    finally:
        for cloud in clouds.values():
            await cloud.stop()


async def test_the_first_cloud_of_the_list_answers(tmp_path: Path) -> None:
    """Each cloud gets its own key, and the record names the one that answered."""
    async with three_clouds(tmp_path) as bed:
        answer = await bed.device.ask(tags="cloud")
        assert (answer.status, answer.headers["x-causeway-target"]) == (200, "large")
        assert bed.asked == {"eu": 1}
        assert bed.clouds["eu"].request_headers[0]["authorization"] == "Bearer key-eu"
        record = await bed.device.record(answer)
        assert [(attempt.target, attempt.cloud) for attempt in record.outcome.attempts] == [("large", "eu")]
        assert list(record.snapshot.clouds) == list(NAMES)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "drip"])
async def test_the_next_cloud_takes_over_before_the_first_byte(tmp_path: Path, fault: Fault, stream: bool) -> None:
    """An answer of the same target from another cloud is not degraded. After the first byte no cloud takes over."""
    async with three_clouds(tmp_path) as bed:
        bed.clouds["eu"].fault = bed.clouds["us"].fault = fault
        answer = await bed.device.ask(tags="cloud", stream=stream)
        if stream and fault in ("die", "unfinished"):
            assert list(bed.asked) == ["eu"]
            assert not answer.done
            return
        assert answer.text == "cloud says so"
        assert list(bed.asked) == list(NAMES)
        assert "x-causeway-degraded" not in answer.headers or answer.headers["x-causeway-degraded"] == "false"
        assert answer.headers["x-causeway-reason"].startswith("fallback: ")
        record = await bed.device.record(answer)
        assert [attempt.cloud for attempt in record.outcome.attempts] == list(NAMES)
        assert (record.outcome.target, record.outcome.degraded) == ("large", False)
        bed.device.assert_nothing_leaks()


@pytest.mark.parametrize("cut", [("eu",), ("us",), ("eu", "us"), ("us", "eu"), ("eu", "us", "ap")])
async def test_clouds_that_are_cut_are_passed_over_until_they_are_back(tmp_path: Path, cut: tuple[str, ...]) -> None:
    """The clouds go one after the other and together; the device answers when all are gone."""
    async with three_clouds(tmp_path) as bed:
        for name in cut:
            await bed.clouds[name].stop()
        await bed.probe()
        left = [name for name in NAMES if name not in cut]
        answer = await bed.device.ask(tags="cloud")
        record = await bed.device.record(answer)
        assert answer.headers["x-causeway-route"] == ("cloud" if left else "edge")
        assert record.outcome.degraded is (not left)
        assert bed.asked == ({left[0]: 1} if left else {})
        assert record.snapshot.down == {f"large@{name}" for name in cut}
        ready = (await bed.device.get("/readyz")).json
        states = {name: "unreachable" if name in cut else "reachable" for name in NAMES}
        assert [(one["name"], one["region"], one["state"]) for one in ready["clouds"]] == [
            (name, name, states[name]) for name in NAMES
        ]
        assert ready["cloud"] == ("reachable" if left else "unreachable")
        for name in cut:
            await bed.clouds[name].start(bed.clouds[name].port)
        await bed.probe()
        await bed.device.ask("again", tags="cloud")
        assert len(bed.clouds["eu"].bodies) == ("eu" not in cut) + 1


async def test_a_client_that_leaves_ends_the_work_at_the_cloud_that_took_over(tmp_path: Path) -> None:
    async with three_clouds(tmp_path) as bed:
        bed.clouds["eu"].fault, bed.clouds["us"].gate = "refuse", asyncio.Event()
        asking = asyncio.ensure_future(bed.device.ask(tags="cloud", stream=True))
        await bed.clouds["us"].entered.wait()
        asking.cancel()
        await until(lambda: bed.clouds["us"].running == 0)
        assert list(bed.asked) == ["eu", "us"]


async def test_a_cloud_is_chosen_by_its_own_signals(tmp_path: Path) -> None:
    policy = POLICY.replace("targets:", "targets:\n  far: {at: 'cloud:us', model: m-large}").replace(
        "routes:", "routes:\n  - {name: away, when: 'cloud.eu.reachable == false && has(cloud.us.rtt_ms)', use: [far]}"
    )
    async with three_clouds(tmp_path, policy.replace("at: cloud\n", "at: cloud:eu\n")) as bed:
        await bed.probe()
        assert (await bed.device.ask(tags="cloud")).headers["x-causeway-target"] == "large"
        await bed.clouds["eu"].stop()
        await bed.probe()
        answer = await bed.device.ask("again", tags="cloud")
        assert (answer.headers["x-causeway-target"], answer.headers["x-causeway-reason"]) == ("far", "away")


async def test_at_cloud_is_the_first_that_the_configuration_lists(tmp_path: Path) -> None:
    async with three_clouds(tmp_path, POLICY, ("us", "eu")) as bed:
        answer = await bed.device.ask(tags="cloud")
        assert bed.asked == {"us": 1}
        assert [one.cloud for one in (await bed.device.record(answer)).outcome.attempts] == ["us"]


async def test_a_policy_cannot_add_a_cloud(tmp_path: Path) -> None:
    """A cloud that the device's own file does not list is never asked."""
    async with three_clouds(tmp_path, IN_ORDER, ("us",)) as bed:
        answer = await bed.device.ask(tags="cloud")
        assert bed.asked == {"us": 1}
        record = await bed.device.record(answer)
        assert record.snapshot.absent == {"large@eu", "large@ap"}
        reasons = [(one.target, one.detail) for one in record.decision.reasons if one.code == "target_absent"]  # type: ignore[union-attr]
        assert reasons == [(f"large@{name}", f"this device has no cloud `{name}`") for name in ("eu", "ap")]


async def test_a_client_may_name_a_target_at_one_of_its_clouds(tmp_path: Path) -> None:
    async with three_clouds(tmp_path) as bed:
        assert (await bed.device.ask(model="large@ap")).headers["x-causeway-target"] == "large"
        assert bed.asked == {"ap": 1}
        assert (await bed.device.ask(model="large@nowhere")).code == "model_not_found"


async def test_embeddings_come_from_another_cloud_of_the_same_target(tmp_path: Path) -> None:
    async with three_clouds(tmp_path) as bed:
        bed.clouds["eu"].status = 500
        body = {"model": "large", "input": "hello"}
        async with bed.device.session.post("/v1/embeddings", json=body) as response:
            assert response.status == 200
        assert bed.asked == {"eu": 1, "us": 1}


async def test_metrics_have_the_clouds_name(tmp_path: Path) -> None:
    async with three_clouds(tmp_path) as bed:
        await bed.clouds["us"].stop()
        await bed.probe()
        metrics = (await bed.device.get("/metrics")).body.decode()
        for name, value in (("eu", "1.0"), ("us", "0.0"), ("ap", "1.0")):
            assert f'causeway_edge_cloud_reachable{{cloud="{name}"}} {value}' in metrics


async def test_a_silent_cloud_is_probed_at_once_and_passed_over(tmp_path: Path) -> None:
    """A cloud accepts connections and answers nothing, as behind a cut network: the next request does not wait."""
    policy = IN_ORDER.replace("first_token_timeout: 300ms\n    timeout: 500ms", "first_token_timeout: 30s")
    async with three_clouds(tmp_path, policy, probe_interval_s=3600.0) as bed:
        await bed.probe()
        silent = bed.clouds["eu"]
        port = silent.port
        await silent.stop()
        server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", port)
        waiting = asyncio.ensure_future(bed.device.ask("first", tags="cloud"))
        eu = bed.device.parts.clouds.first
        assert eu is not None
        await until(lambda: eu.health.reachable is False)
        answer = await bed.device.ask("second", tags="cloud")
        assert [one.cloud for one in (await bed.device.record(answer)).outcome.attempts] == ["us"]
        waiting.cancel()
        server.close()
