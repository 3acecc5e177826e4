"""The topics whose messages are accepted as requests, and the topics on which answers may be published.

An answer is never published on a topic of requests, where it would be answered in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, zip_longest
from urllib.parse import SplitResult, urlsplit

from causeway_server.router.errors import ConfigError, InvalidRequest

from ..config.schema import MqttConfig, MqttTopicConfig

_MAX_TOPIC_BYTES = 1024
_SHARED = "$share/"
_PORTS = {"mqtt": 1883, "mqtts": 8883}


class BrokerUrl:
    """The parsed `mqtt.url`. Raises ConfigError."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(
                f"The URL must be like mqtts://broker.example:8883, not {_shown(parts)!r}.", where="mqtt.url"
            )
        if parts.username or parts.password:
            raise ConfigError("The URL holds credentials. Set mqtt.username and mqtt.password_file.", where="mqtt.url")
        self.tls = parts.scheme == "mqtts"
        self.host = parts.hostname
        try:
            self.port = parts.port or _PORTS[parts.scheme]
        except ValueError as error:
            raise ConfigError(f"{error}", where="mqtt.url") from error

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def _shown(parts: SplitResult) -> str:
    """Return the URL without credentials, for an error message."""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def overlaps(first: str, second: str) -> bool:
    """Return whether a topic exists that both filters match. A topic's name is a filter of that topic alone."""
    if "$" in (first[:1], second[:1]) and first[:1] != second[:1]:
        return False  # a wildcard does not match the broker's own topics
    for level, other in zip_longest(first.split("/"), second.split("/")):
        if "#" in (level, other):
            return True
        if level is None or other is None or (level != other and "+" not in (level, other)):
            return False
    return True


class Topics:
    """The configured topics; `state_topic`: that of this device's state. Raises ConfigError if a filter is invalid, two
    of them overlap, or there is no topic for answers.
    """

    def __init__(self, config: MqttConfig, state_topic: str) -> None:
        if not config.topics:
            raise ConfigError("The list is empty. Add at least one filter.", where="mqtt.topics")
        self._topics = [(_unshared(topic.filter), topic) for topic in config.topics]
        self._response_topics = config.response_topics
        self._state_topic = state_topic
        for text in (*(text for text, _ in self._topics), *config.response_topics):
            _check_filter(text)
        for (first, _), (second, _) in combinations(self._topics, 2):
            if overlaps(first, second):
                raise ConfigError(f"The filters {first!r} and {second!r} match the same topics.", where="mqtt.topics")
        if state_topic and self.find(state_topic) is not None:
            raise ConfigError(
                "The device accepts requests from this topic, so it cannot publish its state on the same topic.",
                where="mqtt.state_topic",
            )
        for text, topic in self._topics:
            if not topic.answer_topic and not config.response_topics:
                message = f"{text!r} has no topic for answers. Set its answer_topic, or mqtt.response_topics."
                raise ConfigError(message, where="mqtt.topics")
            if topic.system and topic.form != "text":
                raise ConfigError(f"{text!r}: `system` is only for `form: text`.", where="mqtt.topics")
            sample = text.replace("+", "any").replace("#", "any")
            if topic.answer_topic and (problem := self._problem(topic.answer_topic.replace("{topic}", sample))):
                raise ConfigError(f"{text!r}: answer_topic {problem}", where="mqtt.topics")

    def __iter__(self) -> Iterator[MqttTopicConfig]:
        return (topic for _, topic in self._topics)

    def find(self, topic: str) -> MqttTopicConfig | None:
        """Return the configuration of this topic; None if there is none."""
        return next((found for text, found in self._topics if overlaps(text, topic)), None)

    def answer_topic(self, config: MqttTopicConfig, topic: str, response_topic: str) -> str:
        """Return the topic of a message's answer. `response_topic`: the message's own, or "". Raises InvalidRequest."""
        configured = self.own_answer_topic(config, topic)
        if configured and response_topic in ("", configured):
            return configured
        if not response_topic:
            raise InvalidRequest("The message names no response topic, and its topic has no answer_topic.")
        problem = self._problem(response_topic)
        if not problem and not any(overlaps(text, response_topic) for text in self._response_topics):
            problem = "is not among mqtt.response_topics of this device"
        if problem:
            raise InvalidRequest(f"The response topic {problem}")
        return response_topic

    def own_answer_topic(self, config: MqttTopicConfig, topic: str) -> str:
        """Return the topic of answers to messages that name none; "" if there is none."""
        answer_topic = config.answer_topic.replace("{topic}", topic)
        return "" if self._problem(answer_topic) else answer_topic

    def _problem(self, topic: str) -> str:
        """Return the reason why answers cannot be published on this topic; "" if they can."""
        if not topic or len(topic.encode()) > _MAX_TOPIC_BYTES or any(one in topic for one in "+#\0"):
            return f"is not a topic name of at most {_MAX_TOPIC_BYTES} bytes"
        if topic[0] == "$":
            return "is reserved by the broker"
        if topic == self._state_topic or self.find(topic) is not None:
            return "is a topic from which this device accepts requests, or its state_topic"
        return ""


def _unshared(text: str) -> str:
    """Return the filter inside ``$share/GROUP/FILTER``."""
    return text.split("/", 2)[2] if text.startswith(_SHARED) and text.count("/") >= 2 else text


def _check_filter(text: str) -> None:
    levels = text.split("/")
    lonely = all(level in ("+", "#") or not {"+", "#"} & set(level) for level in levels)
    if not text or not lonely or "#" in levels[:-1] or "\0" in text or len(text.encode()) > _MAX_TOPIC_BYTES:
        message = f"{text[:100]!r} is not a filter: `+` must be a whole level, and `#` must be the last level."
        raise ConfigError(message, where="mqtt.topics")
