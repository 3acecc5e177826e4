from __future__ import annotations

import msgspec
import pytest
from multidict import CIMultiDict

from causeway_server.router.errors import MisdirectedRequest, OriginNotAllowed
from causeway_server.router.web_origins import HostName, Origin, WebOrigins, is_loopback, listener_hosts

APP = "https://app.example"
EVIL = "https://evil.example"
HOST = "localhost:8080"


def admit(rules: WebOrigins, method: str = "POST", **headers: str) -> dict[str, str]:
    """The names of the headers are written with underscores."""
    sent = CIMultiDict({"Host": HOST} | {name.replace("_", "-"): value for name, value in headers.items()})
    return dict(rules.admit(method, sent))


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "localhost:8080",
            "LOCALHOST:1",
            "localhost.",
            "app.localhost:3000",
            "127.0.0.1",
            "127.8.9.1:80",
        ),
        *("[::1]", "[::1]:8080", "[::ffff:127.0.0.1]", "device.local", "Device.Local:8080", "192.168.1.5:8080"),
    ],
)
def test_loopback_names_the_bound_address_and_configured_names_are_taken(host: str) -> None:
    admit(WebOrigins(hosts=("192.168.1.5", "device.local")), Host=host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8080", "localhost.evil.example", "evil-localhost", "127.0.0.1.evil.example"),
        *("", "[", "[::1", "[::2]:8080", "::1", "0.0.0.0", "10.0.0.1", "2130706433", "device.local.evil.example"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_any_other_name_is_a_421_for_every_method(host: str, method: str) -> None:
    with pytest.raises(MisdirectedRequest, match=r"`server\.hosts`"):
        admit(WebOrigins(hosts=("device.local",)), method, Host=host)


def test_a_request_without_host_is_no_browsers() -> None:
    assert dict(WebOrigins(hosts=()).admit("GET", CIMultiDict())) == {}


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_names_are_checked_on_loopback_without_keys_only(bound: str) -> None:
    assert listener_hosts(bound, ("a",), needs_key=False) == (bound, "a")
    assert listener_hosts(bound, ("a",), needs_key=True) is None


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "192.168.1.5", "device.local"])
def test_beyond_loopback_a_listener_is_reached_by_any_name(bound: str) -> None:
    assert not is_loopback(bound)
    assert listener_hosts(bound, (), needs_key=False) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": f"http://{HOST}"},
        {"Origin": f"https://{HOST}"},  # behind a proxy that ends TLS
        {"Origin": f"HTTP://{HOST.upper()}"},
        {"Sec_Fetch_Site": "same-origin"},
        {"Sec_Fetch_Site": "same-origin", "Origin": APP},  # behind a proxy that writes a `Host` of its own
        {"Sec_Fetch_Site": "none"},
    ],
)
def test_programs_and_pages_of_the_same_origin_may_send_anything(headers: dict[str, str]) -> None:
    assert admit(WebOrigins(), "POST", **headers) == {}
    assert admit(WebOrigins(), "GET", Upgrade="websocket", **headers) == {}


FOREIGN = [
    {"Origin": EVIL},
    {"Origin": "null"},
    {"Origin": "file://"},
    {"Origin": ""},
    {"Origin": "http://["},
    {"Origin": "http://localhost:3000"},
    {"Origin": "http://localhost"},
    {"Origin": f"http://{HOST}", "Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"},
    {"Sec_Fetch_Site": "Cross-Site"},
    {"Sec_Fetch_Site": ""},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_foreign_page_may_only_read(headers: dict[str, str]) -> None:
    """And the browser keeps what it reads: the answer has no header of CORS."""
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        with pytest.raises(OriginNotAllowed):
            admit(WebOrigins((APP,)), method, **headers)
    for upgrade in ("websocket", "WebSocket"):
        with pytest.raises(OriginNotAllowed):
            admit(WebOrigins((APP,)), "GET", Upgrade=upgrade, **headers)
    for method in ("GET", "HEAD", "OPTIONS"):
        assert admit(WebOrigins((APP,)), method, **headers) == {"Vary": "Origin"}


@pytest.mark.parametrize("origin", [APP, "http://localhost:3000", "null", "file://", "capacitor://localhost"])
def test_a_page_of_an_allowed_origin_may_read_the_answer(origin: str) -> None:
    rules = WebOrigins((APP, "http://localhost:3000", "null", "file://", "capacitor://localhost"))
    for method in ("POST", "GET", "DELETE"):
        answer = admit(rules, method, Origin=origin, Sec_Fetch_Site="cross-site")
        assert answer["Access-Control-Allow-Origin"] == origin
        assert answer["Access-Control-Expose-Headers"] == "*"
        assert answer["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in answer


def test_an_allowed_origin_does_not_excuse_a_foreign_name() -> None:
    with pytest.raises(MisdirectedRequest):
        admit(WebOrigins((EVIL,), hosts=()), Host="evil.example", Origin=EVIL)


def test_a_preflight_of_an_allowed_origin_is_answered() -> None:
    asked = CIMultiDict(
        {
            "Origin": APP,
            "Access-Control-Request-Method": "DELETE",
            "Access-Control-Request-Headers": "authorization,x-causeway-tags,x-stainless-os",
            "Access-Control-Request-Private-Network": "true",
        }
    )
    answer = WebOrigins((APP,)).preflight("OPTIONS", asked)
    assert answer is not None
    assert "DELETE" in answer["Access-Control-Allow-Methods"].split(", ")
    assert answer["Access-Control-Allow-Headers"] == "authorization,x-causeway-tags,x-stainless-os"
    assert answer["Access-Control-Allow-Private-Network"] == "true"
    assert int(answer["Access-Control-Max-Age"]) > 0


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("OPTIONS", {"Origin": EVIL, "Access-Control-Request-Method": "POST"}),
        ("OPTIONS", {"Access-Control-Request-Method": "POST"}),
        ("OPTIONS", {"Origin": APP}),
        ("POST", {"Origin": APP, "Access-Control-Request-Method": "POST"}),
    ],
)
def test_all_else_is_no_preflight(method: str, headers: dict[str, str]) -> None:
    assert WebOrigins((APP,)).preflight(method, CIMultiDict(headers)) is None


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        *(
            (one, True)
            for one in (APP, "http://localhost:3000", "null", "file://", "http://[::1]:8080", "tauri://localhost")
        ),
        *(
            (one, False)
            for one in ("*", "", "app.example", f"{APP}/", f"{APP}/x", "https://*.example", "https://", "a b")
        ),
    ],
)
def test_an_origin_is_configured_as_browsers_send_it(text: str, valid: bool) -> None:
    try:
        msgspec.convert(text, Origin)
    except msgspec.ValidationError:
        assert not valid
    else:
        assert valid


@pytest.mark.parametrize(("text", "valid"), [("device.local", True), ("::1", True), ("device:80", False), ("*", False)])
def test_a_host_is_configured_without_a_port(text: str, valid: bool) -> None:
    try:
        msgspec.convert(text, HostName)
    except msgspec.ValidationError:
        assert not valid
    else:
        assert valid
