"""Decision records of the version before keep what was recorded under names of before."""

from __future__ import annotations

from pathlib import Path

import msgspec

from causeway_server.edge_node.storage.decisions import FILE, DecisionQuery, DecisionStore, read_stored
from causeway_server.fleet.repository.records import RecordReader
from causeway_server.router.types import Decision, DecisionRecord, Estimates, Reason
from tests.edge_node.storage.encrypted import database_of
from tests.edge_node.storage.test_decisions import record, store

RECORD = msgspec.structs.replace(
    record(1),
    estimates=Estimates(quality=0.5, images_text=True),
    unrecorded=("audio.speech", "images.text"),
    decision=Decision("p", "r", "", (), (Reason("continued", target="large"),)),
)


def before(found: DecisionRecord) -> object:
    """Return the fields of a record as a daemon of before wrote them."""
    fields = msgspec.to_builtins(found)
    fields["estimates"]["pictures_text"] = fields["estimates"].pop("images_text")
    fields["request"]["continues"] = "large"
    fields["unrecorded"] = [name.replace("images.", "pictures.") for name in fields["unrecorded"]]
    return fields


def test_exported_records_have_the_names_of_today(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    today = msgspec.structs.replace(RECORD, id="d2")
    file.write_bytes(msgspec.json.encode(before(RECORD)) + b"\n" + msgspec.json.encode(today) + b"\n")
    assert [*RecordReader([str(file)])] == [RECORD, today]


async def test_the_records_of_a_state_folder_have_the_names_of_today(tmp_path: Path) -> None:
    opened = store(tmp_path)
    opened.add(RECORD)
    opened.close()
    with database_of(tmp_path / FILE) as database:
        encoded = msgspec.msgpack.encode(before(RECORD))
        database.execute("UPDATE decisions SET record = seal(?, 'decisions', id)", (encoded,))
    assert [*read_stored(tmp_path).records] == [RECORD]
    again: DecisionStore = store(tmp_path)
    assert await again.get("d1") == RECORD
    assert await again.find(DecisionQuery()) == [RECORD]
    again.close()
