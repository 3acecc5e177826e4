"""Take the images of the pages that the READMEs show.

python -m tests.e2e.console.screenshots                                 of stand-ins and scripted devices
python -m tests.e2e.console.screenshots --demo URL --token-file FILE    of a `make demo-fleet` whose rollouts have ended
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from pathlib import Path

from playwright.async_api import Browser, Page, expect

from causeway_server.edge_node.agent.interfaces import AgentSettings, FleetLink
from causeway_server.edge_node.agent.source import FolderSource
from causeway_server.edge_node.agent.trial import TrialSettings
from tests.check.sources import ROOT
from tests.edge_node.agent.fleet import FACTORY, Publisher, member
from tests.edge_node.device import Device, running

from .browser import browser, open_page, press
from .fleet_fixture import FleetFixture, serving

EDGE, FLEET = (ROOT / folder for folder in ("edge_node/console", "fleet/console"))


async def fleet_pages(chromium: Browser) -> None:
    fixture = FleetFixture()
    fixture.signed_in = True
    async with serving(fixture) as origin:
        async with open_page(chromium, f"{origin}/console#/rollouts/r-0107") as (page, _):
            await expect(page.locator(".metric")).to_have_count(3)
            await page.screenshot(path=FLEET / "screenshot.png")
        where = f"{origin}/console#/devices"
        async with open_page(chromium, where, scheme="dark", size=(1440, 800)) as (page, _):
            await expect(page.locator(".grid-body .grid-row").first).to_be_visible()
            await page.screenshot(path=FLEET / "devices.png")


async def device_in_a_fleet(chromium: Browser, folder: Path) -> None:
    """A device that gave one bundle up and tries the next."""
    publisher = Publisher(folder / "fleet")
    link = FleetLink(
        member=lambda: member(publisher.root),
        source=FolderSource(publisher.folder),
        settings=AgentSettings(check_interval_s=0.2, retry_s=0.2, trial=TrialSettings(poll_s=0.05)),
    )
    async with running(folder / "device", policy=FACTORY, fleet=link) as device:
        publisher.release()
        async with open_page(chromium, _url(device), size=(1440, 1080)) as (page, _), asyncio.TaskGroup() as tasks:
            user = tasks.create_task(_use(device))
            await _step(page, "trial")
            device.engine.fault = "refuse"
            await expect(page.locator("#fleet-quarantine")).to_be_visible()
            device.engine.fault = "none"
            await asyncio.sleep(3.0)  # requests that go well are the time before the next trial
            publisher.release()
            await _step(page, "trial")
            await expect(page.locator("#fleet-trial")).to_contain_text(re.compile(r"1[2-9]\d of at least 200"))
            await page.get_by_text("Quarantine (1)").click()
            await page.get_by_text("Journal").click()
            await page.locator("#fleet").screenshot(path=EDGE / "fleet.png")
            user.cancel()


async def _use(device: Device) -> None:
    while True:
        await device.ask("hello")
        await asyncio.sleep(0.05)


async def demo_pages(chromium: Browser, url: str, token: str) -> None:
    async with open_page(chromium, f"{url}/", size=(1280, 860), allowed="401|404") as (page, _):
        await page.get_by_label("Token").fill(token)
        await press(page, ["Enter"])
        await expect(page.locator(".card").first).to_be_visible()
        await expect(page.get_by_text("reverted").first).to_be_visible()
        await page.screenshot(path=FLEET / "rollouts.png")
        await page.get_by_role("listitem").filter(has_text="done").first.get_by_role("link").first.click()
        await expect(page.get_by_role("heading", name="kiosks done")).to_be_visible()
        await expect(page.get_by_text("promises")).to_be_visible()
        await page.screenshot(path=FLEET / "promised.png", full_page=True)
        await page.go_back()
        await page.get_by_role("listitem").filter(has_text="reverted").first.get_by_role("link").first.click()
        await expect(page.get_by_role("heading", name="kiosks reverted")).to_be_visible()
        await page.screenshot(path=FLEET / "reverted.png")


async def _step(page: Page, name: str) -> None:
    await expect(page.locator("#fleet [aria-current=step]")).to_have_text(name)


def _url(device: Device) -> str:
    return f"http://127.0.0.1:{device.app.port}/console"


async def take(demo: str, token: str) -> None:
    async with browser() as chromium:
        if demo:
            await demo_pages(chromium, demo, token)
            return
        with tempfile.TemporaryDirectory(prefix="screenshots-") as folder:
            await fleet_pages(chromium)
            await device_in_a_fleet(chromium, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", default="", metavar="URL")
    parser.add_argument("--token-file", type=Path)
    options = parser.parse_args()
    asyncio.run(take(options.demo, options.token_file.read_text().strip() if options.token_file else ""))


if __name__ == "__main__":
    main()
