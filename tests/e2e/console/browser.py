"""A real Chromium for the consoles' tests, in which anything outside the page's rules is a failure.

    async with open_page(url) as page:
        await page.goto(...)

Each page is watched: a violation of the content security policy, a request to another origin, an exception or an error
in the console fails the test when the page is closed.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright, expect

from tests.prepare.programs import CHROMIUM

Scheme = Literal["light", "dark"]
VENDOR = Path(__file__).parent / "vendor"
PATIENCE_MS = 60_000.0
expect.set_options(timeout=PATIENCE_MS)  # not the default of five seconds
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_REPORT_VIOLATIONS = """addEventListener("securitypolicyviolation", (event) =>
  console.error(`content security policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`))"""


class Watched:
    """What a page did that it must not. `allowed` matches console errors that a test provokes."""

    def __init__(self, origin: str, allowed: str) -> None:
        self._origin = origin
        self._allowed = allowed
        self.faults: list[str] = []
        self.requests: list[str] = []  # paths

    def on_console(self, message: ConsoleMessage) -> None:
        allowed = self._allowed and re.search(self._allowed, message.text)
        if message.type == "error" and not allowed:
            self.faults.append(f"console: {message.text}")

    def on_request(self, request: Request) -> None:
        address = urlsplit(request.url)
        self.requests.append(address.path)
        if f"{address.scheme}://{address.netloc}" != self._origin and address.scheme != "data":
            self.faults.append(f"a request to another origin: {request.url}")


@asynccontextmanager
async def browser(*flags: str) -> AsyncIterator[Browser]:
    """Start Chromium, with more flags of the command line; without one the test is skipped."""
    program = CHROMIUM.find()
    if program is None:
        pytest.skip("no chromium here")
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=program, args=[*_FLAGS, *flags])
        try:
            yield running
        finally:
            await running.close()


@asynccontextmanager
async def open_page(
    running: Browser, url: str, *, scheme: Scheme = "light", size: tuple[int, int] = (1440, 900), allowed: str = ""
) -> AsyncIterator[tuple[Page, Watched]]:
    """Open a page and watch it; at the end it must have kept the rules.

    Args:
        running: The browser.
        url: Its origin is the only one that the page may ask.
        scheme: Of the colours.
        size: Of the window, pixels.
        allowed: A pattern of console errors that the test provokes.
    """
    address = urlsplit(url)
    watched = Watched(f"{address.scheme}://{address.netloc}", allowed)
    context = await running.new_context(
        color_scheme=scheme, viewport={"width": size[0], "height": size[1]}, reduced_motion="reduce"
    )
    await context.add_init_script(_REPORT_VIOLATIONS)
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", watched.on_console)
    page.on("pageerror", lambda error: watched.faults.append(f"exception: {error}"))
    page.on("request", watched.on_request)
    try:
        await page.goto(url)
        yield page, watched
        assert watched.faults == [], watched.faults
    finally:
        await context.close()


async def accessibility_faults(page: Page) -> list[str]:
    """Run axe-core's rules of WCAG 2.2 AA and best practice; return what breaks them."""
    # Evaluated by the debugger, which no content security policy hinders.
    await page.evaluate((VENDOR / "axe.min.js").read_text(encoding="utf-8"))
    found: dict[str, Any] = await page.evaluate(
        "axe.run(document, {resultTypes: ['violations'], runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', "
        "'wcag22aa', 'best-practice']})"
    )
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


async def press(page: Page, keys: Sequence[str]) -> None:
    for key in keys:
        await page.keyboard.press(key)


async def tab_to(page: Page, selector: str, *, most: int = 80) -> None:
    """Press Tab until the focus is on an element that matches; it must be reachable so."""
    for _ in range(most):
        await page.keyboard.press("Tab")
        if await page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab does not reach {selector}")
