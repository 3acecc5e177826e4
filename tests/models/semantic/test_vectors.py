"""The table of vectors finds the nearest rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from causeway_server.models.semantic.index import Vector, VectorTable

D, N = 256, 2748


def _unit(vectors: Vector) -> Vector:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32)


def _normal(seed: int = 0, count: int = N) -> Vector:
    return np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)


def _one_hot() -> Vector:
    return np.eye(D, dtype=np.float32)[np.arange(N) % D] * np.where(np.arange(N) % 3 == 0, -1, 1)[:, None].astype("f4")


def _lengths() -> Vector:
    return _unit(_normal()) * np.float32(10.0) ** (np.arange(N) % 7 - 3)[:, None].astype(np.float32)


# Every kind of row: spread over all directions, near one another, equal, opposite, with one peak, zero, of any length.
KINDS: dict[str, Callable[[], Vector]] = {
    "spread": lambda: _unit(_normal()),
    "clusters": lambda: _unit(_unit(_normal(1, 8))[np.arange(N) % 8] + 0.05 * _normal()),
    "tight": lambda: _unit(_unit(_normal(1, 1)) + 0.001 * _normal()),
    "equal": lambda: _unit(_normal(1, 3))[np.arange(N) % 3],
    "opposite": lambda: _unit(_normal(1, N))[np.arange(N) // 2] * np.where(np.arange(N) % 2, -1, 1)[:, None],
    "peaks": _one_hot,
    "zeros": lambda: np.where((np.arange(N) % 5 == 0)[:, None], 0.0, _unit(_normal())),
    "lengths": _lengths,
    "positive": lambda: _unit(np.abs(_normal())),
}


def _filled(rows: Vector) -> VectorTable:
    vectors = VectorTable(rows.shape[1])
    for row in rows:
        vectors.add(row)
    return vectors


def assert_finds_all(vectors: VectorTable, rows: Vector, query: Vector, most: int, least: float) -> None:
    """What is found are rows with their own products, and no greater product is missing."""
    products = rows.astype(np.float64) @ query
    slack = 1e-5 * float(np.linalg.norm(rows, axis=1).max() * np.linalg.norm(query) + 1e-9)
    found = vectors.nearest(query, most, least)
    assert len({row for row, _ in found}) == len(found)
    for row, product in found:
        assert product == pytest.approx(products[row], abs=slack)
        assert product >= least
    assert [product for _, product in found] == sorted((product for _, product in found), reverse=True)
    expected = np.sort(products)[::-1][:most]
    sure = expected[expected >= least + slack]
    assert len(sure) <= len(found) <= (expected >= least - slack).sum()
    for (_, product), exact in zip(found, expected, strict=False):
        assert product == pytest.approx(exact, abs=slack)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_rows_are_found(kind: str) -> None:
    rows = KINDS[kind]().astype(np.float32)
    vectors = _filled(rows)
    queries = {
        "a row": rows[7],
        "near a row": _unit(rows[9] + 0.03 * _normal(3, 1)[0]),
        "opposite": -rows[11],
        "any": _unit(_normal(5, 1)[0]),
        "one peak": np.eye(D, dtype=np.float32)[3],
        "long": 1000.0 * _unit(_normal(6, 1)[0]),
        "short": 1e-6 * _unit(_normal(6, 1)[0]),
        "zero": np.zeros(D, np.float32),
    }
    for query in queries.values():
        for most in (1, 4, 40):
            for least in (-np.inf, 0.3, 0.99):
                assert_finds_all(vectors, rows, query.astype(np.float32), most, least)


def test_removed_rows_are_not_found_and_the_last_one_takes_their_number() -> None:
    """Also where the table has to grow, and where a removed row is the last one."""
    rows = list(KINDS["spread"]())
    vectors, query = _filled(np.array(rows)), rows[3]
    assert vectors.nearest(query, 1, 0.5) == [(3, pytest.approx(1.0, abs=1e-5))]
    for row in (3, len(rows) - 2, 0, 17):
        vectors.remove(row)
        rows[row] = rows[-1]
        rows.pop()
    for vector in _unit(_normal(9, 600)):
        vectors.add(vector)
        rows.append(vector)
    assert len(vectors) == len(rows)
    for query in (rows[0], rows[17], rows[-1], _unit(_normal(5, 1)[0])):
        assert_finds_all(vectors, np.array(rows), query, 4, -1.0)


def test_an_empty_table_has_no_nearest_row() -> None:
    rows = _unit(_normal(0, 5))
    vectors = _filled(rows)
    for most in (1, 4, 9):
        assert_finds_all(vectors, rows, rows[2], most, -1.0)
    for _ in range(5):
        vectors.remove(0)
    assert vectors.nearest(rows[2], 4, -1.0) == []
