"""`causeway-models prices` on the real library: what it writes, a policy takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from causeway_server.models.cli.commands import main
from causeway_server.router.policy.compiled import parse_policy

POLICY = """\
version: 1
name: p
targets:
  large: {at: cloud, model: m, price: {of: openai/gpt-4o-mini}}
routes: [{name: r, use: [large]}]
"""


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("genai_prices")


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("openai/gpt-4o-mini", ["input: 0.15", "output: 0.6", "cached_input: 0.075"]),
        ("groq/whisper-large-v3", ["audio_second: 0.000030833333"]),
        ("perplexity/sonar", ["input: 1", "per_request: 0.012"]),
    ],
)
def test_the_price_of_a_model_is_printed_as_it_is_written(model: str, keys: list[str]) -> None:
    result = CliRunner().invoke(main, ["prices", "--of", model])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"price: {{of: {model}, table: genai-prices ")
    assert all(f", {key}" in result.output for key in keys), result.output


def test_a_policy_gets_the_prices_of_its_models(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    result = CliRunner().invoke(main, ["prices", str(file)])
    assert result.exit_code == 0, result.output
    price = parse_policy(file.read_text()).targets[0].price
    assert (price.of, price.input, price.output, price.cached_input) == ("openai/gpt-4o-mini", 0.15, 0.6, 0.075)
    assert price.table.startswith("genai-prices ")
    assert (tmp_path / "policy.yaml.before").read_text() == POLICY


@pytest.mark.parametrize(
    ("model", "words"),
    [("openai/gpt-4o-miny", "Did you mean `openai/gpt-4o-mini`?"), ("nobody/nothing-1", "Otherwise write `input`")],
)
def test_a_model_that_the_table_lacks_is_refused_and_the_file_stays(tmp_path: Path, model: str, words: str) -> None:
    file = tmp_path / "policy.yaml"
    text = POLICY.replace("openai/gpt-4o-mini", model)
    file.write_text(text)
    result = CliRunner().invoke(main, ["prices", str(file)])
    assert (result.exit_code, words in result.output) == (1, True), result.output
    assert file.read_text() == text


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    result = CliRunner().invoke(main, ["prices", "--of", "openai/gpt-4o-mini"])
    assert (result.exit_code, "causeway-router[prices]" in result.output) == (1, True)
