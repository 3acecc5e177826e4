"""The device's console in a real browser, on a real daemon with scripted generators."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Error, Route, expect

from causeway_server.edge_node.agent.interfaces import AgentSettings, FleetLink
from causeway_server.edge_node.agent.source import FolderSource
from causeway_server.edge_node.agent.trial import TrialSettings
from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig
from tests.edge_node.agent.fleet import FACTORY, Publisher, member
from tests.edge_node.device import POLICY, Device, running
from tests.edge_node.scripted import CLOUD_WORDS

from .browser import Scheme, accessibility_faults, open_page, press, tab_to

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

SECRET = "a sentence for the model alone"
KEY = "kiosk-secret"
KEY_SHA256 = "28b89c06c1596835df703240ddb92ecca8f9126844cb7bf13af5e91a6e400295"
GAVE_UP = re.compile(r"errors_rose: \d of \d requests failed")
HOT = """routes:
  - name: hot-device
    when: device.temperature_c > 85.0
    use: [large, small]
"""


@pytest_asyncio.fixture(loop_scope="session")
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    """A daemon whose policy asks the cloud first when the device is hot."""
    async with running(tmp_path, policy=POLICY.replace("routes:\n", HOT, 1)) as device:
        yield device


def url(device: Device) -> str:
    return f"http://127.0.0.1:{device.app.port}/console"


async def ask_some(device: Device) -> None:
    for tags in ("kiosk", "private", "cloud", "handoff"):
        await device.ask(f"{SECRET} {tags}", tags=tags, temperature=0)
    await device.ask(f"{SECRET} kiosk", tags="kiosk", temperature=0)  # a hit
    device.engine.fault = device.cloud.fault = "refuse"
    await device.ask(f"{SECRET} 2", tags="edge")
    device.engine.fault = device.cloud.fault = "none"


def row(text: str) -> str:
    return f"#rows tr:has-text('{text}')"


async def test_decisions_appear_as_they_are_made_and_without_content(device: Device, chromium: Browser) -> None:
    async with open_page(chromium, url(device)) as (page, _):
        await expect(page.locator("#empty")).to_be_visible()
        await ask_some(device)
        await expect(page.locator("#rows tr")).to_have_count(6)
        await expect(page.locator(row("cloud-first"))).to_contain_text("large")
        await expect(page.locator(row("cached answer"))).to_contain_text("cache")
        await expect(page.locator(row("only-edge"))).to_contain_text("503")
        await page.get_by_role("searchbox").fill("private")
        await page.locator("#rows tr:visible a").click()
        await expect(page.locator("#detail")).to_contain_text("private-stays")
        assert SECRET not in await page.content()
        assert await page.locator("#tiles").inner_text() != ""
        await expect(page.locator("#fleet")).to_be_hidden()  # this device joined none


async def test_a_record_says_why_and_what_each_attempt_did(device: Device, chromium: Browser) -> None:
    device.engine.score = 0.1
    answer = await device.ask(SECRET, tags="handoff")
    assert answer.headers["x-causeway-target"] == "large"
    async with open_page(chromium, f"{url(device)}#{answer.headers['x-causeway-decision']}") as (page, _):
        detail = page.locator("#detail")
        await expect(detail).to_contain_text("unsure held")
        await expect(detail).to_contain_text("hot-device")
        await expect(detail.locator(".attempt")).to_have_count(2)
        await expect(detail.locator(".attempt").first).to_contain_text("handed off")
        await expect(detail.locator(".attempt").first).to_contain_text("confidence 0.100")


async def test_a_request_is_asked_and_its_hops_are_shown(device: Device, chromium: Browser) -> None:
    """The answer is streamed into the page; the record that opens has the hops, the cost and the heat."""
    async with open_page(chromium, url(device), allowed="503") as (page, _):
        await tab_to(page, "#prompt")
        await page.keyboard.type(SECRET)
        await press(page, ["Enter"])
        await expect(page.locator("#asked .answer")).not_to_be_empty()
        await expect(page.locator("#asked")).to_contain_text("edge")
        hops = page.locator("#detail .hop")
        await expect(hops).to_have_count(5)
        for number, text in enumerate(("Request", "Cache", "Decision", "Attempt", "Outcome")):
            await expect(hops.nth(number)).to_contain_text(text)
        await expect(hops.nth(2)).to_contain_text(re.compile("edge-first, (at [0-9.]+ °C|temperature not readable)"))
        await expect(hops.nth(4)).to_contain_text("answered by small, no cost")
        assert await accessibility_faults(page) == []
        device.engine.fault = device.cloud.fault = "refuse"
        await page.locator("#prompt").fill("again")
        await press(page, ["Enter"])
        await expect(page.locator("#asked .bad")).to_be_visible()


async def test_an_answer_whose_stream_has_heartbeats_is_shown(tmp_path: Path, chromium: Browser) -> None:
    async with running(tmp_path, server=ServerConfig(port=0, heartbeat_s=0.02)) as device:
        device.engine.fault, device.cloud.gate = "refuse", asyncio.Event()
        async with open_page(chromium, url(device)) as (page, _):
            await page.locator("#prompt").fill(SECRET)
            await page.locator("#send").click()
            await expect(page.locator("#asked .answer")).to_be_attached()  # the stream began, with a comment
            device.cloud.gate.set()
            await expect(page.locator("#asked .answer")).to_have_text("".join(CLOUD_WORDS))
            await expect(page.locator("#detail .hop")).to_have_count(6)  # with two attempts


async def test_a_draft_is_checked_compared_and_replayed(device: Device, chromium: Browser) -> None:
    """Over the decisions of this device; nothing is activated, and proofs are said to run elsewhere."""
    await ask_some(device)
    before = device.parts.policies.active.revision
    async with open_page(chromium, url(device)) as (page, _):
        await tab_to(page, "#policy-open")
        await press(page, ["Enter"])
        draft, results = page.get_by_label("Draft of the policy"), page.locator(".results")
        text = await draft.input_value()
        assert text == device.parts.policies.text
        await draft.fill(text.replace("keep: on_device", "keep: nowhere"))
        await press(page, ["Control+Enter"])
        await expect(results).to_contain_text("1 error")
        await draft.fill(text.replace("'\"private\" in request.tags'", "'\"secret\" in request.tags'"))
        await page.get_by_role("button", name="Check").click()
        await expect(results).to_contain_text("test@")
        await expect(results.locator(".difference")).to_contain_text("secret")
        await expect(results).to_contain_text("1 would or may leave the device")
        await expect(page.get_by_role("region", name="Requests that leave the device")).to_contain_text("private-stays")
        await expect(results).to_contain_text("Proofs run on the control plane")
        for size in ((1440, 900), (420, 800)):
            await page.set_viewport_size({"width": size[0], "height": size[1]})
            assert await accessibility_faults(page) == []
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert device.parts.policies.active.revision == before


async def test_another_temperature_changes_the_decision(device: Device, chromium: Browser) -> None:
    """What if it were 90 °C: the daemon decides the recorded request again, and nothing is run."""
    answer = await device.ask(SECRET, tags="kiosk")
    calls = len(device.engine.calls)
    async with open_page(chromium, f"{url(device)}#{answer.headers['x-causeway-decision']}") as (page, _):
        outcomes = page.locator(".outcome")
        await expect(outcomes.first).to_contain_text("edge-first")
        await page.get_by_label("device.temperature_c", exact=True).fill("90")
        await expect(page.locator(".what-if")).to_contain_text("the decision changes")
        await expect(outcomes.nth(1)).to_contain_text("hot-device")
        await page.get_by_label("device.temperature_c", exact=True).fill("20")
        await expect(page.locator(".what-if")).to_contain_text("the decision stays the same")
        await page.get_by_role("button", name="Reset").click()
        await expect(outcomes).to_have_count(1)
        await page.get_by_label("request.tags").fill("private")
        await expect(outcomes.nth(1)).to_contain_text("small")
        await page.get_by_text("Reasons with your changes").click()
        await expect(page.locator(".what-if .reasons")).to_contain_text("private-stays")
    assert (len(device.engine.calls), device.cloud.bodies) == (calls, [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (420, 800)], ids=["wide", "narrow"])
async def test_the_page_is_accessible(device: Device, chromium: Browser, scheme: Scheme, size: tuple[int, int]) -> None:
    await ask_some(device)
    async with open_page(chromium, url(device), scheme=scheme, size=size) as (page, _):
        await expect(page.locator("#rows tr")).to_have_count(6)
        assert await accessibility_faults(page) == []
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.locator(row("edge-first") + " a").first.click()
        await page.get_by_label("device.temperature_c", exact=True).fill("90")
        await expect(page.locator(".outcome")).to_have_count(2)
        await page.locator(".what-if summary").first.click()
        assert await accessibility_faults(page) == []


@pytest.mark.parametrize(
    "attack",
    [
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = true\">')",
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = true'}))",
        "fetch('http://127.0.0.1:1/').then(() => { window.ran = true })",
    ],
    ids=["markup", "script", "other origin"],
)
async def test_what_is_injected_does_not_run(device: Device, chromium: Browser, attack: str) -> None:
    async with open_page(chromium, url(device), allowed="(?i)content security policy|trusted") as (page, _):
        with pytest.raises(Error):
            await page.evaluate(attack)
        assert await page.evaluate("window.ran === undefined")


async def test_everything_can_be_done_from_the_keyboard(device: Device, chromium: Browser) -> None:
    """Skip link, filter, list by arrow keys, a signal, back to the row by Escape."""
    await ask_some(device)
    async with open_page(chromium, url(device)) as (page, _):
        await expect(page.locator("#rows tr")).to_have_count(6)
        await press(page, ["Tab", "Enter"])
        await tab_to(page, "[data-route=edge]")
        await press(page, ["Enter"])
        await expect(page.locator("#rows tr:visible")).to_have_count(3)
        await tab_to(page, "#rows a")
        await press(page, ["ArrowDown", "End", "Home", "ArrowDown", "Enter"])
        await expect(page.locator("#detail-title")).to_be_focused()
        chosen = await page.evaluate("location.hash")
        await expect(page.locator(".outcome")).to_have_count(1)
        await tab_to(page, "input[type=number][id='signal-device.temperature_c']")
        await press(page, ["Control+a", "9", "0"])
        await expect(page.locator(".what-if")).to_contain_text("the decision changes")
        await page.locator("#detail-title").focus()
        await press(page, ["Escape"])
        await expect(page.locator(f"#rows a[href='{chosen}']")).to_be_focused()


async def test_a_page_that_is_paused_asks_nothing(device: Device, chromium: Browser) -> None:
    async with open_page(chromium, url(device)) as (page, watched):
        await page.clock.install()
        await expect(page.locator("#device")).not_to_be_empty()
        await page.get_by_role("button", name="Pause").click()
        await page.wait_for_load_state("networkidle")
        asked = len(watched.requests)
        await page.clock.run_for(60_000)
        assert len(watched.requests) == asked
        await page.get_by_role("button", name="Paused").click()
        await device.ask(SECRET)
        await page.clock.run_for(5_000)
        await expect(page.locator("#rows tr")).to_have_count(1)


async def test_a_device_that_does_not_answer_is_said(device: Device, chromium: Browser) -> None:
    async with open_page(chromium, url(device), allowed="ERR_") as (page, _):
        await expect(page.locator("#device")).not_to_be_empty()
        await page.route("**/console/state", lambda route: route.abort())
        await expect(page.locator("#lost")).to_contain_text("does not answer")
        await page.unroute("**/console/state")
        await expect(page.locator("#lost")).to_be_hidden()


async def test_the_page_asks_for_the_api_key(tmp_path: Path, chromium: Browser) -> None:
    """A wrong key is asked for again; the right one stays in the tab."""
    server = ServerConfig(port=0, drain_s=1.0, keys=(KeyConfig("kiosk", KEY_SHA256),))
    async with running(tmp_path, server=server) as device, open_page(chromium, url(device), allowed="401") as (page, _):
        await expect(page.get_by_role("dialog")).to_be_visible()
        assert await accessibility_faults(page) == []
        await page.get_by_role("textbox", name="Key").fill("wrong")
        await press(page, ["Enter"])
        await expect(page.get_by_role("dialog")).to_contain_text("does not know that key")
        await page.get_by_role("textbox", name="Key").fill(KEY)
        await press(page, ["Enter"])
        await expect(page.locator("#device")).not_to_be_empty()
        await page.reload()
        await expect(page.locator("#device")).not_to_be_empty()
        await expect(page.get_by_role("dialog")).to_be_hidden()


async def test_signals_that_the_device_cannot_read_are_named(device: Device, chromium: Browser) -> None:
    """A device without sensors, engine and cloud shows no zero."""

    async def without_signals(route: Route) -> None:
        response = await route.fetch()
        state = await response.json()
        for group in ("device", "edge", "cloud", "spend"):
            state["snapshot"][group] = dict.fromkeys(state["snapshot"][group])
        state["readiness"]["cloud"] = ""
        await route.fulfill(response=response, json=state)

    async with open_page(chromium, url(device)) as (page, _):
        await page.route("**/console/state", without_signals)
        for title, text in (
            ("Temperature", "no zone is readable"),
            ("Memory", "not readable"),
            ("CPU", "not readable"),
            ("Tokens per second", "no engine"),
            ("Spent", "not counted"),
            ("Cloud", "none is configured"),
        ):
            await expect(page.locator(".tile", has_text=title)).to_contain_text(text)


async def test_each_of_several_clouds_is_shown(device: Device, chromium: Browser) -> None:
    async def with_clouds(route: Route) -> None:
        response = await route.fetch()
        state = await response.json()
        state["readiness"]["clouds"] = [
            {"name": "eu", "region": "eu-central", "state": "unreachable"},
            {"name": "us", "region": "", "state": "unknown"},
        ]
        await route.fulfill(response=response, json=state)

    async with open_page(chromium, url(device)) as (page, _):
        await page.route("**/console/state", with_clouds)
        tile = page.locator(".tile", has_text="round trip")
        for text in ("eu in eu-central: unreachable", "us: not probed"):
            await expect(tile).to_contain_text(text)


@pytest_asyncio.fixture(loop_scope="session")
async def fleet_device(tmp_path: Path) -> AsyncIterator[tuple[Device, Publisher]]:
    """A daemon whose agent tries its bundles for an hour, as far as requests go well."""
    publisher = Publisher(tmp_path / "fleet")
    link = FleetLink(
        member=lambda: member(publisher.root),
        source=FolderSource(publisher.folder),
        settings=AgentSettings(check_interval_s=0.2, retry_s=0.2, trial=TrialSettings(least_s=3600.0, poll_s=0.05)),
    )
    async with running(tmp_path / "device", policy=FACTORY, fleet=link) as device:
        yield device, publisher


async def test_the_agent_shows_its_trial_and_why_it_gave_a_bundle_up(
    fleet_device: tuple[Device, Publisher], chromium: Browser
) -> None:
    device, publisher = fleet_device
    async with open_page(chromium, url(device)) as (page, _):
        fleet = page.locator("#fleet")
        await expect(fleet.locator("#fleet-facts")).to_contain_text("its own files")
        bundle = publisher.release()
        await expect(fleet.locator("[aria-current=step]")).to_have_text("trial")
        await expect(fleet.locator("#fleet-facts")).to_contain_text(f"serial 1, {bundle[:12]}")
        await device.ask(SECRET)
        await expect(fleet.locator("#fleet-trial")).to_contain_text("1 of at least 200")
        await tab_to(page, "#fleet summary")
        await press(page, ["Enter"])
        await expect(fleet.locator("#fleet-rows")).to_contain_text("dry run")
        await page.set_viewport_size({"width": 420, "height": 800})
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert await accessibility_faults(page) == []
        device.engine.fault = "refuse"
        for _ in range(4):
            await device.ask(SECRET)
        await expect(fleet.locator("#fleet-facts")).to_contain_text(GAVE_UP)
        await expect(fleet.locator("#fleet-facts")).to_contain_text("its own files")
        # The journal is still folded out, and shows the way back.
        await expect(fleet.locator("#fleet-rows tr").filter(has_text="rollback")).to_be_visible()
        await fleet.get_by_text("Quarantine (1)").click()
        await expect(fleet.locator("#fleet-quarantined")).to_contain_text(GAVE_UP)
        assert await accessibility_faults(page) == []
