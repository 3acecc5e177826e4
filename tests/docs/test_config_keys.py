"""Configuration keys: each has a description, and pages and examples name keys that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml

from causeway_server.cloud_pool.config import Config as GatewayConfig
from causeway_server.edge_node.config.schema import Config as EdgeConfig
from causeway_server.fleet.operators.operators_file import OperatorsDoc
from causeway_server.fleet.repository.fleet_file import FleetDoc
from causeway_server.fleet.trust.keys import TrustDoc
from causeway_server.router.bundle.settings import FleetSettings
from causeway_server.router.config import default_text, keys_of, schema_of
from causeway_server.router.policy.file import PolicyDoc
from causeway_server.router.policy.signals import SIGNALS, find_signal

from .test_pages import TEXTS

ROOT = Path(__file__).parents[2]
FILES: dict[str, type[msgspec.Struct]] = {
    "edge": EdgeConfig,
    "gateway": GatewayConfig,
    "settings": FleetSettings,
    "fleet": FleetDoc,
    "operators": OperatorsDoc,
    "trust": TrustDoc,
    "policy": PolicyDoc,
}
EXAMPLES = {
    "edge": ROOT / "edge_node" / "deploy" / "edge.example.yaml",
    "gateway": ROOT / "cloud_pool" / "deploy" / "gateway.example.yaml",
}
KEYS = {
    name.rsplit(".", drop)[0].removesuffix("[]")
    for struct in FILES.values()
    for name in keys_of(struct)
    for drop in range(name.count(".") + 1)
}
"""Every key and every section of every file."""
SECTIONS = {name for name in KEYS if any(key.startswith(f"{name}.") for key in KEYS)}
NAMED = re.compile(r"`([a-z_]+(?:\[\])?(?:\.[a-z_0-9]+(?:\[\])?)+)(?:[:=][^`]*)?`")
EVENTS = ("session.update", "session.audio.")  # of live sessions, and their fields
FRAGMENTS = re.compile(r"(As|Of|How|What|Who|Which|That|Where|When|If|In|By|It|Its|There|Those|The same)\b")


@pytest.mark.parametrize("file", FILES)
def test_each_key_is_described_by_a_sentence_of_its_own(file: str) -> None:
    """It begins with a capital letter, a number or code, and hangs on no other key's description."""
    for name, key in keys_of(FILES[file]).items():
        assert re.match(r"[A-Z`0-9]", key.description), name
        assert key.description.endswith("."), name
        assert not FRAGMENTS.match(key.description), name


@pytest.mark.parametrize("file", FILES)
def test_the_schema_of_a_file_is_for_editors(file: str) -> None:
    """Valid by its dialect; unknown keys are refused, and every key is described."""
    schema = json.loads(schema_of(FILES[file], file))
    jsonschema.Draft202012Validator.check_schema(schema)
    described = 0
    for definition in schema["$defs"].values():
        if definition.get("type") == "object":
            assert definition["additionalProperties"] is False
            described += sum("description" in node for node in definition["properties"].values())
    assert described
    assert "\\Z" not in schema_of(FILES[file], file).decode()


@pytest.mark.parametrize("file", EXAMPLES)
def test_the_schema_accepts_the_example(file: str) -> None:
    schema = json.loads(schema_of(FILES[file], file))
    jsonschema.validate(yaml.safe_load(EXAMPLES[file].read_text(encoding="utf-8")), schema)


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        ({"drain_s": 5}, True),
        ({"drain_s": "5m"}, True),
        ({"drain_s": "five"}, False),
        ({"drain_s": -1}, False),
        ({"max_body_bytes": "8 MiB"}, True),
        ({"max_body_bytes": "8 miles"}, False),
        ({"max_bodies": 8}, False),
    ],
)
@pytest.mark.parametrize("file", EXAMPLES)
def test_a_duration_or_size_is_a_number_or_text(file: str, value: dict[str, object], *, accepted: bool) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(schema_of(FILES[file], file)))
    assert validator.is_valid({"server": value}) is accepted


@pytest.mark.parametrize(
    ("file", "name", "shown"),
    [
        ("edge", "jobs.webhooks.max_age_s", "35d"),
        ("edge", "server.max_body_bytes", "8MiB"),
        ("edge", "jobs.cloud_rate_per_s", "5"),
        ("gateway", "streams.batch_wait_s", "5ms"),
        ("gateway", "tiers[].can", "[chat, completion]"),
        ("gateway", "tiers[].retry_budget.share", "0.2"),
        ("fleet", "cohorts.NAME.rollout.stages", "[1, 5, 25, 50, 100]"),
        ("fleet", "name", ""),
    ],
)
def test_a_default_is_shown_as_people_write_it(file: str, name: str, shown: str) -> None:
    assert default_text(name, keys_of(FILES[file])[name]) == shown


@pytest.mark.parametrize("page", [name for name in TEXTS if name != "docs/history.md"])
def test_each_key_in_prose_exists(page: str) -> None:
    """A word in code that begins with a section and a dot is a key, a section or a signal."""
    prose = re.sub(r"^```.*?^```|<!-- generated.*?/generated -->", "", TEXTS[page], flags=re.DOTALL | re.MULTILINE)
    named = {re.sub(r"^clouds\.[a-z]+\.", "clouds.NAME.", name) for name in _named(prose)}
    keys = {name for name in named - KEYS if not name.startswith(EVENTS)}
    assert {name for name in keys if find_signal(name) is None} == set()


def test_each_key_in_a_description_exists() -> None:
    for file, struct in FILES.items():
        for key, described in keys_of(struct).items():
            assert _named(described.description) - KEYS - SIGNALS.keys() == set(), f"{file}: {key}"


@pytest.mark.parametrize("package", ["router", "edge_node", "cloud_pool", "fleet"])
def test_each_description_is_of_a_field(package: str) -> None:
    """The file has no text of a struct or a field that is gone, or that another field has taken over."""
    described = yaml.safe_load((ROOT / package / "keys.yaml").read_text(encoding="utf-8"))
    structs = {
        one.__name__: one
        for struct in (*FILES.values(), *(key.struct for file in FILES.values() for key in keys_of(file).values()))
        for one in struct.__mro__
        if one.__module__.startswith(f"causeway_server.{package}.")
    }
    fields = {name: {*structs[name].__annotations__} if name in structs else set() for name in described}
    assert {name: {*texts} - fields[name] for name, texts in described.items() if {*texts} - fields[name]} == {}


def _named(text: str) -> set[str]:
    """Return the words in code that begin with a section and a dot, but not the names of files."""
    words = {word for word in NAMED.findall(text) if re.split(r"[.\[]", word)[0] in SECTIONS}
    return {word for word in words if not word.endswith((".json", ".yaml"))}
