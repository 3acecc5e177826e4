"""The endpoints of a tier in the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

import causeway_server.cloud_pool
from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.router.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "gateway.yaml"
    path.write_text(text)
    return path


def test_triton_is_shorthand_for_one_endpoint(tmp_path: Path) -> None:
    first = "{name: a, endpoints: ['x:1@eu', 'dns:y:2'], load_balancing: prefix_affinity}"
    text = f"tiers:\n  - {first}\n  - {{name: b, triton: 'z:3'}}\n"
    many, one = load_config(write(tmp_path, text), Flags()).tiers
    assert [(where.address, where.zone, where.is_dns) for where in many.endpoint_addresses] == [
        ("x:1", "eu", False),
        ("y:2", "", True),
    ]
    assert [where.address for where in one.endpoint_addresses] == ["z:3"]
    assert [where.address for where in TierConfig().endpoint_addresses] == ["127.0.0.1:8001"]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("tiers:\n  - name: a\n    endpoints: ['x:1', nowhere]", "gateway.yaml:3:24: tiers[0].endpoints[1]"),
        ("tiers:\n  - name: a\n    endpoints: ['x:1', 'y:2', 'x:1@eu']", "gateway.yaml:3:31: tiers[0].endpoints[2]"),
        ("tiers:\n  - name: a\n    triton: y:1\n    endpoints: ['x:1']", "gateway.yaml:4:5: tiers[0].endpoints"),
        ("tiers:\n  - {name: a, triton: nowhere}", "gateway.yaml:2:15: tiers[0].triton"),
        ("tiers:\n  - {name: a, load_balancing: random}", "gateway.yaml:2:15: tiers[0].load_balancing"),
        ("load_balancing: {max_ejected_share: 2}", "gateway.yaml:1:18: load_balancing.max_ejected_share"),
        ("load_balancing: {load_tokens: 0}", "gateway.yaml:1:18: load_balancing.load_tokens"),
        ("tiers:\n  - {name: a, upstream: {metrics: /metrics}}", "gateway.yaml:2:26: tiers[0].upstream.metrics"),
        ("tiers:\n  - {name: a, upstream: {metrics: 'http://x'}}", "gateway.yaml:2:26: tiers[0].upstream.metrics"),
        ("load_balancing:\n  fault: 2", "gateway.yaml:2:3: load_balancing.fault"),
    ],
)
def test_a_config_error_names_file_line_column_and_key(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, text), Flags())
    assert where in str(raised.value)


def test_a_flag_error_names_the_flag_and_not_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--triton"):
        load_config(write(tmp_path, "tiers:\n  - {name: a, triton: 'z:3'}"), Flags(triton="nowhere"))


def test_the_flag_replaces_only_the_address_that_no_tier_names(tmp_path: Path) -> None:
    tiers = "tiers:\n  - {name: a}\n  - {name: b, triton: 'b:3'}\n  - {name: c, endpoints: ['c:3']}"
    found = load_config(write(tmp_path, tiers), Flags(triton="flag:3")).tiers
    assert [[one.address for one in tier.endpoint_addresses] for tier in found] == [["flag:3"], ["b:3"], ["c:3"]]


def test_a_flag_that_replaces_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--triton: Each tier names its own servers"):
        load_config(write(tmp_path, "tiers:\n  - {name: a, triton: 'z:3'}"), Flags(triton="flag:3"))


def test_the_example_shows_every_load_balancing_key_with_its_default() -> None:
    path = Path(causeway_server.cloud_pool.__file__).parent / "deploy" / "gateway.example.yaml"
    assert load_config(path, Flags()).load_balancing == LoadBalancingConfig()
    text = path.read_text()
    assert all(f"  {name}:" in text for name in LoadBalancingConfig.__struct_fields__)
