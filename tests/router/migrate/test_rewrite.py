"""Names of the version before are replaced where they stand; nothing else of a file changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.edge_node.config.loader import read_yaml
from causeway_server.router.errors import ConfigError
from causeway_server.router.migrate.rewrite import DocumentKind, rewrite
from causeway_server.router.serving.process import migrate_file

EDGE = """\
# the till
modalities:            # what requests bring
  "max_parts": 4       # few
  remembered: 10
decisions: {record: cheap, max_age_s: 7d}
jobs:
    steady_per_s: 2
realtime: {partial_s: 0.5}
fleet: {check_s: 30s, 'telemetry_s': 1m}
"""
EDGE_NOW = """\
# the till
parts:            # what requests bring
  "max_parts": 4       # few
  fact_cache_entries: 10
decisions: {signals: named, max_age_s: 7d}
jobs:
    cloud_rate_per_s: 2
realtime: {partial_interval_s: 0.5}
fleet: {check_interval_s: 30s, 'telemetry_interval_s': 1m}
"""
GATEWAY = """\
tiers:
  - name: large
    hedge:             # twice
      enabled: true
      # after this share
      max_share: 0.1
    # where it runs
    triton: localhost:8001
degradation:
  continue_key_file: ""     # no answer is truncated
  truncate_to_tokens: 128
  tiers: []
jobs:
  off_peak:
    hours: 22:00-06:00
    price_share: 0.5
  lease_s: 30s
parts: {remembered: 5, remembered_s: 5m}
tenants:
  prices: [{tier: large, per_1k_prompt: 0.00015, per_1k_completion: 2}]  # in USD
"""
GATEWAY_NOW = """\
tiers:
  - name: large
    # where it runs
    triton: localhost:8001
degradation:
  tiers: []
jobs:
  lease_s: 30s
parts: {fact_cache_entries: 5, fact_cache_ttl_s: 5m}
tenants:
  prices: [{tier: large, input: 0.15, output: 2000}]  # in USD
"""
POLICY = """\
targets:
  a: {at: cloud, usd_per_1k_tokens: 0.07, model: m}
  b:
    usd_per_1k_tokens: 2.5e-4  # cheap
    at: cloud
routes:
  - name: several-lines
    when: >
      has(pictures.text) &&
      pictures.text
  - {name: ä, when: 'has( pictures.text ) && "pictures.text" in request.tags'}  # pictures.text
constraints: [{name: dots, when: pictures . text}]
cache: [{when: "!pictures.text"}]
"""
POLICY_NOW = """\
targets:
  a: {at: cloud, price: {input: 70, output: 70}, model: m}
  b:
    price: {input: 0.25, output: 0.25}  # cheap
    at: cloud
routes:
  - name: several-lines
    when: >
      has(images.text) &&
      images.text
  - {name: ä, when: 'has( images.text ) && "pictures.text" in request.tags'}  # pictures.text
constraints: [{name: dots, when: images.text}]
cache: [{when: "!images.text"}]
"""
CASES = """\
cases:
  - snapshot: {pictures: {text: true}, edge: {queue: 0}}
    expect: {reasons: [{code: signal_absent, detail: pictures.text}]}
"""
CASES_NOW = """\
cases:
  - snapshot: {images: {text: true}, edge: {queue: 0}}
    expect: {reasons: [{code: signal_absent, detail: images.text}]}
"""
FLEET = """\
cohorts:
  eu.west:
    signals: [pictures.text, edge.queue]
    settings: {modalities.max_parts: 3, decisions.record: cheap, log: info}
    models:
      m:
        golden: [{prompt: picture, answer: b, picture: x.png}]
        adapters: {night: {golden: [{prompt: a, answer: b, picture: y.png}]}}
  us:
    settings:
      jobs.max_revise_s: 1m
      log: info
"""
FLEET_NOW = """\
cohorts:
  eu.west:
    signals: [images.text, edge.queue]
    settings: {parts.max_parts: 3, decisions.signals: named, log: info}
    models:
      m:
        golden: [{prompt: picture, answer: b, image: x.png}]
        adapters: {night: {golden: [{prompt: a, answer: b, image: y.png}]}}
  us:
    settings:
      log: info
"""
RULES = """\
- expr: rate(causeway_cloud_tokens_total{type=~"prompt|completion",tier="prompt"}[5m])
- expr: causeway_edge_running_requests + causeway_edge_requests_total
- expr: causeway_cloud_request_seconds_bucket{le="1"} / causeway_cloud_requests_rejected_total
- {"expr": "causeway_cloud_tenant_tokens{type=\\"completion\\"}"}
"""
RULES_NOW = """\
- expr: rate(causeway_gateway_tokens_total{type=~"input|output",tier="prompt"}[5m])
- expr: causeway_edge_requests_running + causeway_edge_requests_total
- expr: causeway_gateway_request_seconds_bucket{le="1"} / causeway_gateway_requests_rejected_total
- {"expr": "causeway_gateway_tenant_tokens{type=\\"output\\"}"}
"""


@pytest.mark.parametrize(
    ("kind", "before", "now"),
    [
        ("edge.yaml", EDGE, EDGE_NOW),
        ("gateway.yaml", GATEWAY, GATEWAY_NOW),
        ("policy", POLICY, POLICY_NOW),
        ("cases", CASES, CASES_NOW),
        ("fleet.yaml", FLEET, FLEET_NOW),
        ("metrics", RULES, RULES_NOW),
    ],
)
def test_names_are_replaced_and_all_else_stays(kind: DocumentKind, before: str, now: str) -> None:
    """A second time there is nothing to do; the ends of lines stay, too."""
    rewritten = rewrite(before, "file", kind)
    assert (rewritten.text, rewritten.left) == (now, ())
    assert rewrite(now, "file", kind).changes == ()
    assert rewrite(before.replace("\n", "\r\n"), "file", kind).text == now.replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (
            "edge.yaml",
            "parts: {}\nmodalities: {}\n",
            "file:2:1: modalities: .* Both names are set. Delete one of them.",
        ),
        ("edge.yaml", '"modaliti\\x65s": {}\n', "file:1:1: modalities: .*written with escapes"),
        ("gateway.yaml", "tiers: [{name: a, hedge: {}}]\n", r"file:1:19: tiers\[0\].hedge: `hedge` was removed"),
        ("gateway.yaml", "tiers:\n- hedge: {}\n  name: a\n", r"file:2:3: tiers\[0\].hedge: `hedge` was removed"),
        (
            "fleet.yaml",
            "cohorts: {a: {settings: {jobs.max_revise_s: 1m}}}\n",
            r"file:1:26: .*`jobs\.max_revise_s` was removed\. Answers of jobs are no longer revised",
        ),
        ("policy", 'routes:\n- when: >\n    pictures.text ||\n    "pictures.text" == "" // pictures.text\n', "by hand"),
        ("edge.yaml", "server: {port\n", "not valid YAML"),
        ("policy", "targets: {a: {usd_per_1k_tokens: free}}\n", "file:1:34: .* This price is not a number"),
        ("policy", "targets: {a: {price: {}, usd_per_1k_tokens: 1}}\n", "Both names are set"),
    ],
)
def test_what_cannot_be_decided_is_named_with_its_place(kind: DocumentKind, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        rewrite(text, "file", kind)


def test_metrics_with_other_labels_are_left_to_people() -> None:
    """The rest of the file is rewritten."""
    rewritten = rewrite(
        'a: causeway_cloud_ttft_seconds_bucket\nb: {__name__=~"causeway_cloud_.+"}\nc: causeway_cloud_retries\n',
        "rules.yaml",
        "metrics",
    )
    assert [change.new for change in rewritten.changes] == ["causeway_gateway_retries"]
    assert [line.split(" ")[0] for line in rewritten.left] == ["rules.yaml:1:", "rules.yaml:2:"]
    assert "gen_ai_server_time_to_first_token" in rewritten.left[0]


@pytest.mark.parametrize("text", ["", "# only this\n", "server: {port: 1}\n"])
def test_a_file_of_today_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "edge.yaml"
    path.write_text(text)
    assert list(migrate_file(path, "edge.yaml").report(str(path))) == [f"{path}: nothing to rewrite."]
    assert [file.name for file in tmp_path.iterdir()] == ["edge.yaml"]


def test_a_file_is_kept_as_it_was_with_its_mode(tmp_path: Path) -> None:
    """A link stays a link: the file behind it is rewritten."""
    path, link = tmp_path / "edge.yaml", tmp_path / "link.yaml"
    path.write_text(EDGE)
    path.chmod(0o640)
    link.symlink_to(path.name)
    report = [*migrate_file(link, "edge.yaml").report(str(link))]
    assert report[0] == f"{link}: line 2: `modalities` is now `parts`."
    assert link.is_symlink()
    assert (path.read_text(), (tmp_path / "edge.yaml.before").read_text()) == (EDGE_NOW, EDGE)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("edge.yaml", "edge.yaml.before")} == {0o640}


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "edge.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"edge\.yaml"):
        migrate_file(path, "edge.yaml")


CLOUD_BEFORE = """\
log: info
cloud:                      # ours
  url: https://c.example/v1 # Frankfurt
  # the token
  api_key_file: cloud.key
  timeout_s: 30s
jobs: {}
"""
CLOUD_NOW = """\
log: info
clouds:
  main:
    url: https://c.example/v1 # Frankfurt
    key_file: cloud.key
cloud:                      # ours
  # the token
  timeout_s: 30s
jobs: {}
"""


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (CLOUD_BEFORE, CLOUD_NOW),
        ("cloud:\n  url: http://c/v1\n", "clouds:\n  main:\n    url: http://c/v1\n"),
        (
            "cloud: {url: 'http://c/v1', api_key: \"a, b\", probe_interval_s: 5}\n",
            "clouds: {main: {url: 'http://c/v1', key: \"a, b\"}}\ncloud: {probe_interval_s: 5}\n",
        ),
        ("cloud: {url: 'http://c/v1', ca_file: a.pem}", "clouds: {main: {url: 'http://c/v1', ca_file: a.pem}}\n"),
        ("cloud: {timeout_s: 5}\n", "cloud: {timeout_s: 5}\n"),
        ("clouds: {eu: {url: 'http://c/v1'}}\n", "clouds: {eu: {url: 'http://c/v1'}}\n"),
    ],
)
def test_the_only_cloud_moves_to_the_clouds(before: str, now: str) -> None:
    rewritten = rewrite(before, "edge.yaml", "edge.yaml")
    assert rewritten.text == now
    read_yaml(now, "edge.yaml")  # today's loader takes it
    assert rewrite(now, "edge.yaml", "edge.yaml").changes == ()


@pytest.mark.parametrize(
    "text",
    ["clouds: {}\ncloud: {url: http://c/v1}\n", "cloud: {\n  url: http://c/v1}\n", "{cloud: {url: http://c/v1}}\n"],
)
def test_a_cloud_that_cannot_be_moved_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"`cloud.url` is now `clouds.main.url`\. Edit this section by hand\."):
        rewrite(text, "edge.yaml", "edge.yaml")
