"""The operators' page before a real control plane: sign-in, a rollout from its start to its abort, a device, the
log."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from causeway_server.fleet.trust.offline import signed_manifests
from causeway_server.router.bundle.manifest import bundle_id
from causeway_server.router.bundle.protocol import DeviceState
from tests.fleet.operators.conftest import operated_fleet, serving
from tests.fleet.server.device import sample

from .browser import accessibility_faults, open_page, press
from .test_fleet_page import REFRESH_MS

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

DEVICES = 16  # of fewer the first stage could draw all, and leave no control to compare with


async def shown(page: Page, wanted: Locator) -> None:
    """Return when the page shows it; it asks the control plane again each REFRESH_MS of its clock."""
    while not await wanted.is_visible():
        await page.clock.fast_forward(REFRESH_MS)
        await asyncio.sleep(0.1)


async def confirm(page: Page, button: str, label: str, text: str) -> None:
    await page.get_by_role("button", name=button).click()
    await page.get_by_label(label).fill(text)
    await press(page, ["Enter"])
    await expect(page.get_by_role("dialog")).to_be_hidden()


async def test_an_approver_begins_watches_and_aborts_a_rollout(tmp_path: Path, chromium: Browser) -> None:
    signed = operated_fleet(tmp_path)
    bundle = bundle_id(signed_manifests(signed.published)["kiosk"])
    async with serving(signed) as server:
        devices = await server.enrolled(DEVICES)
        for device in devices:
            await device.report()
            await device.count(sample(None))
        async with open_page(chromium, f"{server.url}/", allowed="401|404") as (page, _):
            await page.clock.install()
            await page.reload()
            await page.get_by_label("Token").fill(server.bootstrap)
            await press(page, ["Enter"])
            await expect(page.locator("#actor")).to_contain_text("bootstrap (approver)")
            kiosk = page.locator(".card", has_text="kiosk")
            await expect(kiosk).to_contain_text(f"{DEVICES} devices")
            await kiosk.get_by_role("button", name="New rollout").click()
            await page.get_by_label("Bundle id").fill(bundle)
            await press(page, ["Enter"])
            # No device uploaded records: the rollout waits until an approver lets it go on without a replay.
            await shown(page, page.get_by_role("heading", name="kiosk paused"))
            await confirm(page, "Accept", "Reason", "there are no records yet")
            await shown(page, page.get_by_role("heading", name="kiosk stage"))
            await confirm(page, "Pause", "Reason", "watching store 12")
            await shown(page, page.get_by_role("heading", name="kiosk paused"))
            await shown(page, page.locator(".notes, .metric").first)
            assert await accessibility_faults(page) == []
            detail = await server.get(f"/v1/rollouts/{page.url.rpartition('/')[2]}")
            margins = {metric["name"]: metric["margin"] for metric in detail["looks"][-1]["metrics"]}
            assert margins.pop("quorum") is None
            assert margins == {"errors": 0.02, "degraded": 0.05, "latency": 0.05, "rolled_back": 0.02, "silent": 0.02}
            await confirm(page, "Abort", "Reason", "found a bug")
            await shown(page, page.get_by_role("heading", name="kiosk revert"))
            await expect(page.locator(".events")).to_contain_text("rollout abort by bootstrap: found a bug")

            await page.get_by_role("link", name="Devices", exact=True).click()
            await page.get_by_label("Search").fill("device-9")
            await expect(page.get_by_role("status")).to_have_text("1 found")
            await page.locator(".grid-body .grid-row").click()
            await confirm(page, "Hold", "Reason", "is being moved")
            await expect(page.get_by_role("button", name="Release")).to_be_visible()
            await devices[9].report(state=DeviceState.QUARANTINE, code="trial_errors", reason="7 % of answers failed")
            await page.reload()
            await expect(page.locator(".events").first).to_contain_text("trial_errors: 7 % of answers failed")

            await page.goto(f"{server.url}/console#/policies?from={bundle}&to={bundle}")
            await expect(page.get_by_role("status")).to_have_text("The policies are the same.")
            await page.get_by_role("link", name="Audit").click()
            await expect(page.locator("main")).to_contain_text("chain unbroken")
            await expect(page.locator("tbody")).to_contain_text("device device-9, reason is being moved")
            assert await accessibility_faults(page) == []
            await page.get_by_role("button", name="Sign out").click()
            await expect(page.get_by_label("Token")).to_be_visible()
