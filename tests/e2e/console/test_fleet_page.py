"""The operators' page in a real browser, before a stand-in for the operators' API with 5,000 devices."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from .browser import Scheme, accessibility_faults, open_page, press, tab_to
from .fleet_fixture import TOKEN, FleetFixture, bundle, serving

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
ROWS = ".grid-body .grid-row"
REFRESH_MS = 5000


@pytest.fixture
def fleet() -> FleetFixture:
    return FleetFixture()


@pytest_asyncio.fixture(loop_scope="session")
async def origin(fleet: FleetFixture) -> AsyncIterator[str]:
    fleet.signed_in = True
    async with serving(fleet) as origin:
        yield origin


async def test_signing_in_by_token_and_out_again(chromium: Browser) -> None:
    """A wrong token is refused; without single sign-on there is no link to it."""
    async with serving(FleetFixture()) as origin, open_page(chromium, f"{origin}/", allowed="401|404") as (page, _):
        await expect(page.get_by_label("Token")).to_be_focused()
        assert await accessibility_faults(page) == []
        await expect(page.get_by_role("link", name="single sign-on")).to_have_count(0)
        await page.keyboard.type("wrong")
        await press(page, ["Enter"])
        await expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("not known")
        await page.keyboard.type(TOKEN)
        await press(page, ["Enter"])
        await expect(page.locator("#actor")).to_contain_text("anna@example.org (approver)")
        await expect(page.locator("#fleet")).to_have_text("stores")
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_label("Token")).to_be_visible()


async def test_signing_in_by_single_sign_on(chromium: Browser) -> None:
    """The link is there because the control plane has an issuer; asking whether it has one asks no issuer."""
    fleet = FleetFixture(devices=10, oidc=True)
    async with serving(fleet) as origin, open_page(chromium, f"{origin}/console", allowed="401") as (page, _):
        link = page.get_by_role("link", name="Continue with single sign-on")
        await expect(link).to_be_visible()
        assert fleet.changes == []
        await link.click()
        await expect(page.locator("#actor")).to_contain_text("anna@example.org")


async def test_any_two_texts_are_laid_side_by_side(chromium: Browser) -> None:
    """Each side is its text, equal lines are as many as can be; texts without anything in common take no time."""
    random_ = random.Random(3)
    texts = [["\n".join(random_.choices("abcd", k=random_.randrange(12))) for _ in range(2)] for _ in range(200)]
    texts.append(["\n".join(f"{side}{line}" for line in range(8000)) for side in "xy"])
    async with (
        serving(FleetFixture(devices=1)) as origin,
        open_page(chromium, f"{origin}/console", allowed="401|404") as (page, _),
    ):
        found = await page.evaluate(
            "async (texts) => { const { sideBySide } = await import('/console/line_diff.js');"
            " return texts.map(([before, after]) => sideBySide(before, after)); }",
            texts,
        )
    for (before, after), rows in zip(texts, found, strict=True):
        assert "\n".join(left for left, _, _ in rows if left is not None) == before
        assert "\n".join(right for _, right, _ in rows if right is not None) == after
        same = sum(1 for left, right, kind in rows if kind == "same" and left == right)
        assert len(rows) > 1000 or same == longest_common(before.split("\n"), after.split("\n"))


def longest_common(one: list[str], other: list[str]) -> int:
    lengths = [0] * (len(other) + 1)
    for line in one:
        diagonal = 0
        for index, candidate in enumerate(other):
            above = lengths[index + 1]
            lengths[index + 1] = diagonal + 1 if line == candidate else max(above, lengths[index])
            diagonal = above
    return lengths[-1]


async def test_cohorts_and_rollouts_are_listed(origin: str, chromium: Browser) -> None:
    async with open_page(chromium, f"{origin}/console") as (page, _):
        await expect(page.locator(".card")).to_have_count(3)
        await expect(page.locator(".card").first).to_contain_text("4,200 devices")
        whole = page.get_by_role("region", name="Fleet")
        for text in ("5,000", "82.3 %of 144,360 requests", "$59.19$0.41 per 1,000", "78 °Cin kiosk"):
            await expect(whole).to_contain_text(text)
        await expect(page.get_by_role("region", name="In progress").locator(".row")).to_have_count(2)
        ended = page.get_by_role("region", name="Ended").locator(".row")
        await expect(ended).to_have_count(3)
        await expect(ended.filter(has_text="refused")).to_contain_text("checks, stopped here")
        await expect(page.locator(".row", has_text="paused").locator("[aria-current]")).to_contain_text("25 %")


async def test_a_rollout_shows_its_verdict_with_intervals(origin: str, chromium: Browser) -> None:
    async with open_page(chromium, f"{origin}/console#/rollouts/r-0107") as (page, _):
        await expect(page.locator(".metric")).to_have_count(3)
        await expect(page.locator(".metric").first.locator("svg.intervals .whisker")).to_have_count(5)
        await expect(page.get_by_role("img", name="errors, canary minus control")).to_be_visible()
        await expect(page.locator(".notes")).to_contain_text("rolled back")
        await page.get_by_text("All looks as a table").click()
        await expect(page.locator("details tbody tr")).to_have_count(45)
        await expect(page.locator(".side")).to_contain_text("replay: 0 requests leave a device")


async def test_every_change_is_confirmed_and_needs_a_reason(
    origin: str, fleet: FleetFixture, chromium: Browser
) -> None:
    async with open_page(chromium, f"{origin}/console#/rollouts/r-0107") as (page, _):
        await page.get_by_role("button", name="Pause").click()
        assert await accessibility_faults(page) == []
        await page.get_by_role("button", name="Cancel").click()
        await page.get_by_role("button", name="Pause").click()
        await page.get_by_role("dialog").get_by_role("button", name="Pause").click()
        assert fleet.changes == []
        await page.get_by_label("Reason").fill("watching store 12")
        await press(page, ["Enter"])
        await expect(page.get_by_role("heading", name="kiosk paused")).to_be_visible()
        await page.get_by_role("button", name="Accept").click()
        await page.get_by_label("Reason").fill("store 12 is fine")
        await press(page, ["Enter"])
        await expect(page.locator("[aria-current=step]")).to_contain_text("25 %")
        await page.get_by_role("button", name="Abort").click()
        await page.get_by_label("Reason").fill("found a bug")
        await press(page, ["Enter"])
        await expect(page.get_by_role("heading", name="kiosk aborted")).to_be_visible()
        assert fleet.changes == [("pause", "r-0107"), ("accept", "r-0107"), ("abort", "r-0107")]


async def test_a_refused_change_says_why_and_stays_open(origin: str, fleet: FleetFixture, chromium: Browser) -> None:
    """Another operator paused it in between: the control plane's message names the states."""
    async with open_page(chromium, f"{origin}/console#/rollouts/r-0107", allowed="409") as (page, _):
        await page.get_by_role("button", name="Pause").click()
        fleet.rollouts["r-0107"]["state"] = "paused"
        await page.get_by_label("Reason").fill("again")
        await press(page, ["Enter"])
        await expect(page.get_by_role("dialog")).to_contain_text("a rollout in state paused does not allow pause")
        await press(page, ["Escape"])
        await expect(page.get_by_role("dialog")).to_be_hidden()


async def test_a_role_that_may_not_gets_no_button(chromium: Browser) -> None:
    """An operator cannot accept, a viewer can change nothing."""
    for role, disabled in (("operator", ["Accept"]), ("viewer", ["Resume", "Accept", "Abort"])):
        fleet = FleetFixture(devices=10, role=role)
        fleet.signed_in = True
        async with serving(fleet) as origin, open_page(chromium, f"{origin}/console#/rollouts/r-0108") as (page, _):
            button = page.get_by_role("button", name="Accept")
            await expect(button).to_have_attribute("title", f"Needs the role approver; you are {role}")
            assert await page.locator("main button:disabled").all_inner_texts() == disabled


async def test_a_rollout_is_started(origin: str, fleet: FleetFixture, chromium: Browser) -> None:
    """An unsigned bundle is refused beside the field."""
    async with open_page(chromium, f"{origin}/console", allowed="404") as (page, _):
        await page.locator(".card", has_text="lab").get_by_role("button", name="New rollout").click()
        await page.get_by_label("Bundle id").fill("f" * 64)
        await press(page, ["Enter"])
        await expect(page.get_by_role("dialog")).to_contain_text("signed no such bundle")
        await page.get_by_label("Bundle id").fill(bundle("b5"))
        await press(page, ["Enter"])
        await expect(page.get_by_role("heading", name="lab lint")).to_be_visible()
        assert fleet.changes == [("apply", "lab")]


async def test_a_join_token_is_shown_once(origin: str, chromium: Browser) -> None:
    async with open_page(chromium, f"{origin}/console", allowed="400") as (page, _):
        await page.locator(".card", has_text="lab").get_by_role("button", name="Add devices").click()
        await page.get_by_label("Devices", exact=True).fill("none")
        await press(page, ["Enter"])
        await expect(page.get_by_role("dialog")).to_contain_text("Expected `int`")
        await page.get_by_label("Devices", exact=True).fill("12")
        await press(page, ["Enter"])
        await expect(page.get_by_role("textbox", name="Token")).to_have_value("cwjoin_0123")
        assert await accessibility_faults(page) == []
        await press(page, ["Enter"])
        await expect(page.get_by_role("dialog")).to_be_hidden()
        assert "cwjoin_0123" not in await page.locator("main").inner_text()


async def test_a_draft_is_checked_compared_and_proved(origin: str, chromium: Browser) -> None:
    """By keyboard: an error leads to its line, a request that could leave is the counterexample of a proof."""
    async with open_page(chromium, f"{origin}/console#/policies") as (page, _):
        await tab_to(page, "a.button")
        await press(page, ["Enter"])
        draft, results = page.get_by_label("Draft of the policy"), page.locator(".results")
        text = await draft.input_value()
        await draft.fill(text.replace("device.temperature_c", "device.temprature_c"))
        await press(page, ["Control+Enter"])
        await expect(results).to_contain_text("did you mean `device.temperature_c`?")
        await expect(results).not_to_contain_text("Proof")
        await page.get_by_role("button", name="line 12:").click()
        selected = await draft.evaluate("(field) => field.value.slice(field.selectionStart, field.selectionEnd)")
        assert selected == "    when: device.temprature_c > 85.0"
        await draft.fill(text.replace('"private" in request.tags', '"secret" in request.tags'))
        await press(page, ["Control+Enter"])
        await expect(results).to_contain_text("1 line differs")
        await expect(results.locator("li", has_text="refuted").first).to_contain_text('"private"')
        await expect(results).to_contain_text("No recorded request to replay yet")
        for size in ((1440, 900), (420, 800)):
            await page.set_viewport_size({"width": size[0], "height": size[1]})
            assert await accessibility_faults(page) == []
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.get_by_role("button", name="Reset").click()
        assert await draft.input_value() == text


async def test_five_thousand_devices_scroll_in_a_bounded_document(
    origin: str, fleet: FleetFixture, chromium: Browser
) -> None:
    """Pages are loaded as they come near; the document holds only the rows in view."""
    async with open_page(chromium, f"{origin}/console#/devices") as (page, watched):
        await expect(page.locator(ROWS).first).to_contain_text("device-00000")
        assert watched.requests.count("/v1/devices") == 1
        most = 0
        last = page.locator(ROWS, has_text="device-04999")
        for _ in range(400):
            await page.locator(".grid").evaluate("grid => grid.scrollTop = grid.scrollHeight")
            most = max(most, await page.locator(ROWS).count())
            if await last.count():
                break
        await expect(last).to_be_visible()
        await expect(page.get_by_role("status")).to_have_text("5,000 found")
        assert most < 60
        assert watched.requests.count("/v1/devices") == 25
        await expect(page.locator(".grid")).to_have_attribute("aria-rowcount", "5001")


async def test_devices_are_searched_and_filtered_by_the_control_plane(
    origin: str, fleet: FleetFixture, chromium: Browser
) -> None:
    wanted = [each for each in fleet.devices.values() if each["state"] == "quarantine" and each["cohort"] == "kiosk"]
    async with open_page(chromium, f"{origin}/console#/devices") as (page, _):
        await page.get_by_label("State").select_option("quarantine")
        await page.get_by_label("Cohort").select_option("kiosk")
        await expect(page.get_by_role("status")).to_have_text(f"{len(wanted)} found")
        await expect(page.locator(ROWS).first).to_contain_text("trial_errors")
        await page.reload()
        await expect(page.get_by_role("status")).to_have_text(f"{len(wanted)} found")
        await page.get_by_label("State").select_option("")
        await page.get_by_label("Search").fill("device-00123")
        await expect(page.locator(ROWS)).to_have_count(1)


async def test_a_device_tells_its_history_and_takes_orders(origin: str, fleet: FleetFixture, chromium: Browser) -> None:
    name = next(each["id"] for each in fleet.devices.values() if each["state"] == "quarantine" and not each["held"])
    async with open_page(chromium, f"{origin}/console#/devices/{name}") as (page, _):
        await expect(page.locator(".events li")).to_have_count(7)
        await expect(page.locator(".facts")).to_contain_text("trial_errors: 7.1 % of answers failed")
        assert await accessibility_faults(page) == []
        for button, label, text in (("Hold", "Reason", "being moved"), ("Pin", "Bundle id", bundle("b3"))):
            await page.get_by_role("button", name=button).click()
            await page.get_by_label(label).fill(text)
            await press(page, ["Enter"])
            await expect(page.get_by_role("dialog")).to_be_hidden()
        await expect(page.get_by_role("button", name="Release")).to_be_visible()
        await page.get_by_role("button", name="Revoke").click()
        await page.get_by_label("Reason").fill("stolen")
        await press(page, ["Enter"])
        await expect(page.locator("main")).to_contain_text("revoked")
        await expect(page.get_by_role("button", name="Revoke")).to_have_count(0)
        assert fleet.changes == [("hold", name), ("pin", name), ("revoke", name)]


async def test_policies_stand_side_by_side(origin: str, chromium: Browser) -> None:
    async with open_page(chromium, f"{origin}/console#/rollouts/r-0107") as (page, _):
        await page.get_by_role("link", name="Compare the policies").click()
        await expect(page.get_by_role("status")).to_have_text("4 lines differ")
        await expect(page.locator("td.gone", has_text="85.0")).to_have_count(1)
        await expect(page.locator("td.fresh", has_text="80.0")).to_have_count(1)
        await expect(page.locator("td.fresh")).to_have_count(4)
        assert await accessibility_faults(page) == []
        await page.get_by_label("To").select_option(bundle("b3"))
        await expect(page.get_by_role("status")).to_have_text("The policies are the same.")


async def test_the_audit_log_shows_a_broken_chain(origin: str, fleet: FleetFixture, chromium: Browser) -> None:
    async with open_page(chromium, f"{origin}/console#/audit") as (page, _):
        await expect(page.locator("tbody tr")).to_have_count(5)
        await expect(page.locator("tbody tr").first).to_contain_text("share 5000")
        await expect(page.locator("main")).to_contain_text("chain unbroken")
        assert await accessibility_faults(page) == []
        fleet.audit[2]["previous"] = "f" * 64
        await page.reload()
        await expect(page.locator("main")).to_contain_text("chain broken at row 3")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["rollouts", "rollouts/r-0107", "rollouts/r-0104", "devices"])
async def test_views_are_accessible(origin: str, chromium: Browser, scheme: Scheme, view: str) -> None:
    async with open_page(chromium, f"{origin}/console#/{view}", scheme=scheme) as (page, _):
        await expect(page.locator("#view > *")).to_be_visible()
        assert await accessibility_faults(page) == []


@pytest.mark.parametrize(("view", "part", "count"), [("rollouts/r-0107", ".metric", 3), ("devices", ".grid-body", 1)])
async def test_a_narrow_window_is_accessible(origin: str, chromium: Browser, view: str, part: str, count: int) -> None:
    """A wide table scrolls by itself, not the page."""
    async with open_page(chromium, f"{origin}/console#/{view}", size=(420, 800)) as (page, _):
        await expect(page.locator(part)).to_have_count(count)
        assert await accessibility_faults(page) == []
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_everything_can_be_done_from_the_keyboard(origin: str, fleet: FleetFixture, chromium: Browser) -> None:
    """A device is found and held, a rollout is paused."""
    async with open_page(chromium, f"{origin}/console") as (page, _):
        await expect(page.locator(".card")).to_have_count(3)
        await tab_to(page, "nav a[href='#/devices']")
        await press(page, ["Enter"])
        await tab_to(page, ".grid")
        await press(page, ["PageDown", "PageDown", "ArrowUp", "Home", "ArrowDown", "ArrowDown", "Enter"])
        await expect(page.get_by_role("heading", name="device-00002")).to_be_visible()
        await _press_button(page, "Hold", lambda: page.keyboard.type("is being moved"))
        await expect(page.get_by_role("button", name="Release")).to_be_visible()
        await page.goto(f"{origin}/console#/rollouts/r-0107")
        await expect(page.locator(".metric")).to_have_count(3)
        await _press_button(page, "Pause", lambda: page.keyboard.type("lunch"))
        await expect(page.get_by_role("heading", name="kiosk paused")).to_be_visible()
        assert fleet.changes == [("hold", "device-00002"), ("pause", "r-0107")]


async def _press_button(page: Page, name: str, answer: Callable[[], Awaitable[None]]) -> None:
    for _ in range(30):
        await press(page, ["Tab"])
        if await page.evaluate("document.activeElement.textContent") == name:
            break
    await press(page, ["Enter"])
    await expect(page.locator("#confirm-input")).to_be_focused()
    await answer()
    await press(page, ["Enter"])


async def test_a_refresh_keeps_what_the_reader_opened(origin: str, fleet: FleetFixture, chromium: Browser) -> None:
    """The rollout moves on; the table stays open and the focus where it was."""
    async with open_page(chromium, f"{origin}/console#/rollouts/r-0107") as (page, _):
        await page.get_by_text("All looks as a table").click()
        await page.get_by_text("All looks as a table").focus()
        fleet.rollouts["r-0107"]["stage"] = 2
        await expect(page.locator("[aria-current=step]")).to_contain_text("25 %")
        await expect(page.locator("details tbody")).to_be_visible()
        await expect(page.get_by_text("All looks as a table")).to_be_focused()


async def test_a_control_plane_that_is_away_is_said(origin: str, chromium: Browser) -> None:
    async with open_page(chromium, f"{origin}/console", allowed="ERR_") as (page, _):
        await page.clock.install()
        await page.reload()
        await expect(page.locator(".card")).to_have_count(3)
        await page.route("**/v1/**", lambda route: route.abort())
        await page.clock.fast_forward(REFRESH_MS)
        await expect(page.locator("#lost")).to_contain_text("does not answer")
        await expect(page.locator(".card")).to_have_count(3)
        await page.unroute("**/v1/**")
        await page.clock.fast_forward(REFRESH_MS)
        await expect(page.locator("#lost")).to_be_hidden()


async def test_a_session_that_ended_leads_to_the_entrance(origin: str, fleet: FleetFixture, chromium: Browser) -> None:
    async with open_page(chromium, f"{origin}/console", allowed="401|404") as (page, _):
        await expect(page.locator(".card")).to_have_count(3)
        fleet.signed_in = False
        await page.get_by_role("link", name="Audit").click()
        await expect(page.get_by_label("Token")).to_be_visible()
