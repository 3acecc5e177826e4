"""The prompts file: what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.models.comparison.prompts import read_prompts

GOOD = b'{"prompt": "hello"}\n'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"not json", "malformed"),
        (b"\xff\xfe", "malformed"),
        (b'["hello"]', "Expected `object`"),
        (b'{"text": "hello"}', "unknown field `text`"),
        (b'{"prompt": " "}', "`prompt` is empty"),
        (b'{"prompt": "x", "answer": "y"}', "must be given together"),
        (b'{"prompt": "x", "answer": "C", "metric": "choice", "choices": {"A": "1"}}', "not among the `choices`"),
        (b'{"prompt": "x", "answer": "many", "metric": "number"}', "no number"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_file_and_line(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(match=f"{path}:3: .*{fault}") as refused:
        read_prompts([path])
    assert "Correct or delete" in str(refused.value)


def test_many_bad_lines_are_counted_and_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"garbage\n" * 100)
    with pytest.raises(match="and 95 more lines"):
        read_prompts([path])
    path.write_bytes(b"\n")
    with pytest.raises(match="the file has no lines; a line is, for example,"):
        read_prompts([path])
    with pytest.raises(match="No such file"):
        read_prompts([tmp_path / "missing.jsonl"])


def test_a_repeated_prompt_is_asked_once(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(GOOD * 3)
    assert len(read_prompts([path, path])) == 1
