"""A gateway's configuration of the version before: refused by name, and rewritten by `causeway-cloud migrate`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from causeway_server.cloud_pool.cli.main import main
from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.router.errors import ConfigError

BEFORE = "tiers:\n  - name: large\n    hedge: {enabled: true}\nparts: {remembered: 5, remembered_s: 60}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BEFORE, r"gateway\.yaml:3:5: tiers\[0\]\.hedge: `hedge` was removed\. .*`causeway-cloud migrate` rewrites"),
        ("parts: {remembered: 5}\n", r"gateway\.yaml:1:9: .*`parts\.remembered` is now `parts\.fact_cache_entries`\."),
        (
            "tenants: {prices: [{tier: a, per_1k_prompt: 1}]}\n",
            r"`per_1k_prompt` is now `input`\. Prices are now per million tokens: multiply the old price by 1,000\.",
        ),
        ("jobs: {off_peak: {hours: 22-6}}\n", r"gateway\.yaml:1:8: jobs\.off_peak: .*There are no off-peak hours"),
        ("parts: {remembered_s: 5}\n", r"`parts\.remembered_s` is now `parts\.fact_cache_ttl_s`\."),
    ],
)
def test_an_old_key_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file, Flags(), {})


def test_the_file_is_rewritten(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(BEFORE)
    result = CliRunner().invoke(main, ["migrate", str(file)])
    assert result.exit_code == 0, result.output
    parts = load_config(file, Flags(), {}).parts
    assert (parts.fact_cache_entries, parts.fact_cache_ttl_s) == (5, 60.0)
    assert CliRunner().invoke(main, ["migrate", str(file)]).output == f"{file}: nothing to rewrite.\n"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["migrate", str(tmp_path / "no.yaml")])
    assert (result.exit_code, "no.yaml: No such file" in result.output) == (2, True)
