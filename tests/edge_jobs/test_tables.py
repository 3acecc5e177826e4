from __future__ import annotations

import sqlite3

import pytest

from edge_node.jobs.tables import QUERIES, SCHEMA


@pytest.mark.parametrize("query", QUERIES)
def test_no_query_reads_the_whole_table(query: str) -> None:
    """A scan makes acceptance slower with each job that waits."""
    with sqlite3.connect(":memory:") as database:
        database.executescript(SCHEMA)
        plan = database.execute(f"EXPLAIN QUERY PLAN {query}", [0] * query.count("?")).fetchall()
    steps = [str(row[3]) for row in plan]
    assert not [step for step in steps if not step.startswith("SEARCH")], steps
