"""A draft of a policy, tried on one request without a device."""

from __future__ import annotations

import pytest

from causeway_server.router.checks.explanation import RouteExplanation, try_draft
from causeway_server.router.errors import ConfigError, ModelNotFound
from causeway_server.router.types import NowSignals
from tests.router.sample_requests import kiosk

NOON = NowSignals(hour=12, weekday=3, minute=0, unix=1_700_000_000)


def tried(*settings: str, text: str = "turn on the light") -> RouteExplanation:
    return try_draft(kiosk(), text, settings, NOON)


def targets(explanation: RouteExplanation) -> list[str]:
    return [plan.target.name for plan in explanation.decision.attempts]


def test_the_length_of_the_text_decides_unless_the_tokens_are_set() -> None:
    assert tried().decision.rule == "fast-path"
    assert tried(text="word " * 100).decision.rule == "otherwise"
    assert tried("request.prompt_tokens=500").decision.rule == "otherwise"
    absent = tried("request.prompt_tokens=")
    assert (absent.decision.rule, absent.estimates.prompt_tokens) == ("otherwise", None)


def test_signals_are_absent_unless_set() -> None:
    reasons = {(reason.code, reason.rule) for reason in tried().decision.reasons}
    assert ("signal_absent", "hot-device") in reasons
    hot = tried("device.temperature_c=91")
    assert (hot.decision.rule, targets(hot)) == ("hot-device", ["large", "small"])
    assert hot.snapshot.device.temperature_c == 91.0


def test_fields_of_the_request_are_set_by_their_signals_names() -> None:
    private = tried("request.tags=private, a", "request.prefer=prefer_cloud")
    assert private.decision.private
    assert targets(private) == ["small"]
    assert targets(tried("request.model=medium")) == ["medium"]
    assert tried("request.temperature=0").cache.exact is not None
    assert tried("request.temperature=0.7").cache.exact is None
    assert tried("edge.quality=0.25").estimates.quality == 0.25


def test_each_cloud_has_signals_of_its_own() -> None:
    clouds = tried("cloud.eu.rtt_ms=20", "cloud.us.rtt_ms=110", "cloud.us.reachable=true", "cloud.us.reachable=")
    assert {name: cloud.rtt_ms for name, cloud in clouds.snapshot.clouds.items()} == {"eu": 20.0, "us": 110.0}
    assert clouds.snapshot.clouds["us"].reachable is None
    with pytest.raises(ConfigError, match="Expected a number, not 'near'"):
        tried("cloud.eu.rtt_ms=near")


def test_a_target_that_is_down_is_tried_last() -> None:
    assert targets(tried("down=small")) == ["large", "small"]
    assert targets(tried("down=[small]", "down=")) == ["small", "large", "small"]


def test_the_last_setting_of_a_signal_counts() -> None:
    assert tried("device.temperature_c=91", "device.temperature_c=40").decision.rule == "fast-path"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("device.temprature_c=90", "--set device.temprature_c=90: Unknown signal `device.temprature_c`, did you mean"),
        ("temperature=90", "Unknown signal `temperature`"),
        ("device.temperature_c", "Write KEY=VALUE, such as device.temperature_c=90"),
        ("device.temperature_c=hot", "Expected a number, not 'hot'"),
        ("request.n=1.5", "Expected a whole number, not '1.5'"),
        ("cloud.reachable=maybe", "Expected true or false, not 'maybe'"),
        ("cloud.breaker=opened", "Expected one of closed, half_open, open, not 'opened'"),
        ("request.prefer=cloud", "Expected one of prefer_on_device, only_on_device, prefer_cloud, only_cloud"),
    ],
)
def test_a_wrong_setting_is_an_error_that_says_what_to_write(setting: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tried(setting)
    assert words in caught.value.message


def test_an_unknown_model_is_an_error() -> None:
    with pytest.raises(ModelNotFound, match="Available: auto, small, large, medium"):
        tried("request.model=huge")
