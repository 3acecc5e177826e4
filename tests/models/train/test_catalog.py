"""The shipped function catalogue and the schemas made from it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_train.function_calls.call import expected_call
from causeway_train.function_calls.catalog import CATALOG, FunctionSpec, catalog_of, load_catalog, save_catalog
from causeway_train.function_calls.dataset import Row
from causeway_train.function_calls.intents import OUT_OF_SCOPE

ROWS = (
    Row("six am", "alarm_set", (("time", "six am"),), source="hwu64"),
    Row("rain in May", "GetWeather", (("timeRange", "May"),), source="snips2017"),
    Row("is it hot", "weather", source="clinc150"),
    Row("flip a coin", "flip_coin", source="clinc150"),
    Row("where is my card", "card_arrival", source="banking77"),
)


def test_the_shipped_catalogue_covers_all_four_sources() -> None:
    catalog = load_catalog()
    names = [function.name for function in catalog]
    assert names == sorted(set(names))
    assert all(name.isascii() and " " not in name for name in names)
    assert {"alarm_set", "weather_get", "flip_coin", "bank_card_arrival", OUT_OF_SCOPE} <= set(names)
    assert {function.source for function in catalog} == {"hwu64", "snips2017", "clinc150", "banking77"}
    assert 20 < sum(function.device for function in catalog) < len(catalog) / 2


def test_a_catalogue_is_made_from_rows_and_reads_back(tmp_path: Path) -> None:
    """Merged intents add no function of their own; arguments are renamed."""
    catalog = catalog_of(ROWS)
    by_name = {function.name: function for function in catalog}
    assert set(by_name) == {"alarm_set", "weather_get", "flip_coin", "bank_card_arrival", OUT_OF_SCOPE}
    assert by_name["weather_get"] == FunctionSpec("weather_get", "snips2017", True, ("time_range",))
    save_catalog(catalog, tmp_path / "c.json")
    assert load_catalog(tmp_path / "c.json") == catalog


def test_a_schema_accepts_the_expected_calls() -> None:
    by_name = {function.name: function for function in load_catalog()}
    for row in ROWS[:2]:
        call = expected_call(row)
        tool = msgspec.to_builtins(by_name[call.name].tool())
        assert tool["type"] == "function"
        assert set(call.arguments) <= set(tool["function"]["parameters"]["properties"])
    assert by_name[OUT_OF_SCOPE].schema()["properties"] == {}


def test_a_missing_or_bad_catalogue_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="gone"):
        load_catalog(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text('[{"name": 1}]')
    with pytest.raises(ArtifactError, match=r"bad\.json"):
        load_catalog(tmp_path / "bad.json")
    assert CATALOG.is_file()
