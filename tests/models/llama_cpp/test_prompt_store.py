"""System prompts as files: an engine that restarts knows them, and nothing that a user wrote is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from causeway_server.models.llama_cpp.protocol import Prompt
from causeway_server.models.llama_cpp.scheduling.prompt_prefixes import (
    MIN_TOKENS,
    PromptStore,
    StoredPrompt,
    _read_header,
)
from causeway_server.router.types import Message

from .conftest import Rig

MakeRig = Callable[..., Rig]
SYSTEM = "turn on the light in the kitchen and set the alarm for six " * 6
SECRET = "my secret is tomorrow"
MB = 1024 * 1024
KEY = bytes(32)


def ask(user: str, system: str = SYSTEM) -> Prompt:
    return Prompt(messages=(Message("system", system), Message("user", user)))


def stored_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prompt"))


@pytest.fixture
def start(make_rig: MakeRig, tmp_path: Path) -> Callable[..., Rig]:
    def start(**changes: object) -> Rig:
        options = {"prompt_folder": str(tmp_path), "prompt_key": KEY, "prompt_bytes": 64 * MB, "weights_sha256": "one"}
        return make_rig(**options | changes)

    return start


def test_a_restarted_engine_knows_the_system_prompt(start: Callable[..., Rig], tmp_path: Path) -> None:
    rig = start()
    first = rig.run(ask(SECRET), max_tokens=8, store_prompt=True)
    rig.engine.close()
    (file,) = stored_files(tmp_path)
    assert file.stat().st_mode & 0o77 == 0
    again = start().run(ask(SECRET), max_tokens=8, store_prompt=True)
    assert (again.text, first.end.cached_tokens) == (first.text, 0)
    assert again.end.cached_tokens >= 64


def test_users_words_are_in_no_file(start: Callable[..., Rig], tmp_path: Path) -> None:
    rig = start()
    rig.run(ask(SECRET), store_prompt=True)
    rig.run(Prompt(messages=(Message("user", SECRET + SYSTEM),)), store_prompt=True)
    rig.run(Prompt(text=SECRET + SYSTEM), store_prompt=True)
    prompts = rig.engine.core.prompts
    whole, stored = prompts.tokens(ask(SECRET)), prompts.system_tokens(ask(SECRET))
    rig.engine.close()
    (file,) = stored_files(tmp_path)
    assert "secret" not in rig.engine.core.vocabulary.decode(whole[:stored].tolist())
    with file.open("rb") as opened:
        identity = _read_header(opened).identity
    found = PromptStore(tmp_path, 64 * MB, identity, KEY).find(whole)
    assert found is not None
    assert found.tokens.tolist() == whole[:stored].tolist()
    assert whole[: MIN_TOKENS // 2].tobytes() not in file.read_bytes()


def test_a_request_that_may_not_reach_the_disk_leaves_nothing(start: Callable[..., Rig], tmp_path: Path) -> None:
    rig = start()
    rig.run(ask(SECRET))
    rig.engine.close()
    assert not list(tmp_path.iterdir())


def test_files_of_other_weights_are_removed(start: Callable[..., Rig], tmp_path: Path) -> None:
    rig = start()
    rig.run(ask(SECRET), store_prompt=True)
    rig.engine.close()
    assert start(weights_sha256="other").run(ask(SECRET)).end.cached_tokens == 0
    assert not stored_files(tmp_path)


@pytest.mark.parametrize("damage", ["flipped", "cut", "grown", "not one", "directory"])
def test_a_damaged_file_is_ignored_and_said(
    start: Callable[..., Rig], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start()
    text = rig.run(ask(SECRET), store_prompt=True).text
    rig.engine.close()
    (file,) = stored_files(tmp_path)
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-100] ^= 1
    file.unlink()
    if damage == "directory":
        file.mkdir()
    else:
        file.write_bytes(bytes({"cut": data[:-1], "grown": data + b"x", "not one": b"GGUF"}.get(damage, data)))
    answer = start().run(ask(SECRET), store_prompt=True)
    assert (answer.text, answer.end.cached_tokens) == (text, 0)
    assert str(file) in caplog.text


# --- the store by itself ----------------------------------------------------------------------------------------------


def prompt(number: int) -> np.ndarray:
    return np.arange(100, dtype=np.int32) + 1000 * number


def state(size: int = 5000) -> np.ndarray:
    return np.arange(size, dtype=np.int64).astype(np.uint8)


def test_files_are_bounded_and_the_least_used_goes_first(tmp_path: Path) -> None:
    store = PromptStore(tmp_path, 12_000, "a", KEY)
    store.save(prompt(1), state())
    store.save(prompt(2), state())
    store.flush()
    first = store.find(prompt(1))
    assert first is not None
    assert store.load(first) is not None
    store.save(prompt(3), state())
    store.save(prompt(4), state(20_000))
    store.flush()
    assert [store.wants(prompt(number)) for number in (1, 2, 3, 4)] == [False, True, False, True]
    assert sum(file.stat().st_size for file in stored_files(tmp_path)) <= 12_000
    assert len(PromptStore(tmp_path, 6_000, "a", KEY)) == 1


def test_what_a_killed_engine_was_writing_is_swept(tmp_path: Path) -> None:
    (tmp_path / "half.draft").write_bytes(b"causeway prompt 1\n")
    assert len(PromptStore(tmp_path, MB, "a", KEY)) == 0
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PromptStore(tmp_path / "folder", MB, "a", KEY)
    (tmp_path / "folder").rmdir()
    store.save(prompt(1), state())
    store.flush()
    stored = store.find(prompt(1))
    assert isinstance(stored, StoredPrompt)
    assert store.load(stored) is None
    assert store.find(prompt(1)) is None
    assert "is not stored" in caplog.text


def test_a_folder_that_cannot_be_made_stores_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = PromptStore(tmp_path / "file", MB, "a", KEY)
    store.save(prompt(1), state())
    assert len(store) == 0
