"""The refits of a device: cut short, on a full disk, and with files that it did not write."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("onnxruntime")

from causeway_server.edge_node.serving.requests import Admission
from causeway_server.edge_node.signals.corrections import EVERY, LEAST, Refusal, propose
from causeway_server.edge_node.signals.estimators import LearnedEstimators
from causeway_server.edge_node.signals.refits import Refits
from causeway_server.edge_node.storage.state_folder import StateFolderLock
from causeway_server.models.signals.calibration import REFITS_FILE as FILE
from causeway_server.models.signals.calibration import Correction, Refit, read_refits
from causeway_server.router.policy.compiled import Limits, parse_policy
from tests.edge_node.signals.test_corrections import golden, labels

from .test_calibrated_pair import OPEN, POLICY, SURE, chat, publish, score

NOW = 1_780_000_000.0
CLOUD_ONLY = """
version: 1
name: cloud
targets: {large: {at: cloud, model: assistant-large}}
routes: [{name: all, use: [large]}]
"""


def learned(folder: Path, **changes: object) -> LearnedEstimators:
    """Estimators whose pair states the engine's score, with golden answers of which 70 % are good."""
    found = LearnedEstimators((publish(folder, **{"golden": tuple(golden(0.7)), **changes}),))
    found.activate(POLICY)
    return found


def refits(
    found: LearnedEstimators, directory: Path | None, fit: Callable[..., Refit | Refusal] = propose, count: int = 600
) -> Refits:
    """Refits with so many labels, 70 % of which are good where both signals state 0.9."""
    made = Refits(found, directory, lambda: NOW, fit)
    made.use(refit=True)
    for label in labels(0.7, count=count):
        made.add(found.pairs["assistant"], label)
    return made


def stored(found: LearnedEstimators, directory: Path, offset: float = -0.5) -> Refit:
    refit = Refit(found.pairs["assistant"], 3, NOW, 600, 0.1, Correction(), Correction(1.0, offset))
    directory.mkdir(exist_ok=True)
    (directory / FILE).write_bytes(msgspec.json.encode([refit]))
    return refit


def absurd(**values: float) -> bytes:
    """A file of a refit that no daemon writes."""
    refit = {"signals_sha256": "x", "number": 1, "at": NOW, "labels": 600, "gain": 0.1}
    return msgspec.json.encode([refit | {"quality": {}, "confidence": {}} | values])


async def test_a_refit_is_used_kept_and_counted(tmp_path: Path) -> None:
    found = learned(tmp_path)
    made = refits(found, tmp_path)
    assert made.due
    assert score(found, chat(OPEN), SURE) == pytest.approx(0.9)
    await made.run()
    assert not made.due
    assert score(found, chat(OPEN), SURE) == pytest.approx(0.7, abs=0.02)
    assert found.quality(POLICY, chat(OPEN)) == pytest.approx(0.65, abs=0.03)  # it was 0.88
    (kept,) = read_refits(tmp_path)
    samples = {(one.name, one.labels[-1][1]): one.value for one in made.samples()}
    assert samples["causeway_edge_refits", "adopted"] == 1
    assert samples["causeway_edge_refit_labels", "assistant"] == kept.labels == 600
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


async def test_a_restart_goes_on_with_the_refit(tmp_path: Path) -> None:
    found = learned(tmp_path)
    stored(found, tmp_path)
    refits(found, tmp_path, count=0)
    assert score(found, chat(OPEN), SURE) == pytest.approx(0.845, abs=0.01)


async def test_labels_of_an_earlier_run_are_not_judged_again(tmp_path: Path) -> None:
    """The labels of `test_labels_against_a_refit_give_it_up`, restored: the refit stays, and no fit is due at once."""
    found = learned(tmp_path)
    stored(found, tmp_path)
    made = refits(found, tmp_path, count=0)
    for label in labels(1.0, count=600):
        made.restore(found.pairs["assistant"], label)
    assert made.in_use
    for number, label in enumerate(labels(0.8, count=EVERY)):
        assert not made.due, number
        made.add(found.pairs["assistant"], label)
    assert made.due
    assert made.in_use


async def test_labels_of_an_earlier_run_without_a_refit_count_for_the_first_fit(tmp_path: Path) -> None:
    found = learned(tmp_path)
    made = refits(found, tmp_path, count=0)
    for label in labels(0.7, count=LEAST - 1):
        made.restore(found.pairs["assistant"], label)
    assert not made.due
    made.add(found.pairs["assistant"], labels(0.7, count=1)[0])
    assert made.due


async def test_a_request_cancels_a_refit_and_nothing_has_changed(tmp_path: Path) -> None:
    """The fit is in its thread when the request comes, and its result is too late."""
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(*arguments: object) -> Refit:
        began.set()
        go_on.wait()
        refit = propose(*arguments)  # type: ignore[arg-type]
        ended.set()
        assert isinstance(refit, Refit)
        return refit

    found, admission = learned(tmp_path), Admission(Limits())
    made = refits(found, tmp_path, slow)

    async def refit() -> None:
        with admission.spare():
            await made.run()

    running = asyncio.create_task(refit())
    assert await asyncio.to_thread(began.wait, 20)
    async with admission.permit(asyncio.get_running_loop().time() + 10):
        await running
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 20)
    assert made.due
    assert (made.in_use, list(made.samples()), (tmp_path / FILE).exists()) == ({}, [], False)
    assert score(found, chat(OPEN), SURE) == pytest.approx(0.9)


KILLED = """
    import asyncio, os, signal
    from pathlib import Path
    from tests.edge_node.signals.test_refits import learned, refits

    folder = Path({folder!r})
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    asyncio.run(refits(learned(folder / "signals"), folder / "state").run())
"""


async def test_a_daemon_that_is_killed_while_it_writes_leaves_no_refit(tmp_path: Path) -> None:
    (tmp_path / "signals").mkdir()
    state = tmp_path / "state"
    program = textwrap.dedent(KILLED.format(folder=str(tmp_path)))
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    (partial,) = state.iterdir()
    assert partial.name.endswith(".partial")
    lock = StateFolderLock(state)
    lock.acquire()
    lock.release()
    assert not partial.exists()
    assert read_refits(state) == []


async def test_without_room_on_the_disk_the_shipped_calibration_stays(tmp_path: Path) -> None:
    """The file cannot be replaced, as its name is a folder's."""
    found = learned(tmp_path)
    made = refits(found, tmp_path)
    (tmp_path / FILE).mkdir()
    await made.run()
    assert score(found, chat(OPEN), SURE) == pytest.approx(0.9)
    assert dict(made.results) == {("assistant", "not_stored"): 1}
    assert not made.due


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\xff",
        b'[{"signals_sha256":"x"}]',
        b"[1",
        b"{}",
        absurd(at=1e18),
        absurd(number=-1),
        absurd(labels=-1),
    ],
)
async def test_a_file_that_cannot_be_read_is_removed_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    (tmp_path / FILE).write_bytes(data)
    found = learned(tmp_path)
    refits(found, tmp_path, count=0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cannot be read and is removed" in caplog.text
    assert not (tmp_path / FILE).exists()
    assert score(found, chat(OPEN), SURE) == pytest.approx(0.9)


async def test_a_file_that_fails_the_golden_answers_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = learned(tmp_path)
    stored(found, tmp_path, offset=2.5)
    refits(found, tmp_path, count=0)
    assert "is dropped, because it makes the golden answers less likely." in caplog.text
    assert not (tmp_path / FILE).exists()
    assert score(found, chat(OPEN), SURE) == pytest.approx(0.9)


async def test_a_policy_with_other_signals_uses_no_refit_and_keeps_it(tmp_path: Path) -> None:
    """A policy with other signals is pushed and taken back; the daemon may restart meanwhile."""
    (tmp_path / "earlier").mkdir()
    (tmp_path / "later").mkdir()
    kept = stored(learned(tmp_path / "earlier"), tmp_path)
    found = learned(tmp_path / "later", golden=tuple(golden(0.8)))
    made = refits(found, tmp_path)
    assert score(found, chat(OPEN), SURE) == pytest.approx(0.9)
    assert read_refits(tmp_path) == [kept]
    await made.run()
    assert read_refits(tmp_path) == [*made.in_use.values(), kept]
    made.give_up("an alarm")
    again = learned(tmp_path / "earlier")
    refits(again, tmp_path, count=0)
    assert score(again, chat(OPEN), SURE) == pytest.approx(kept.confidence(0.9, 0))


async def test_labels_outlive_a_policy_without_these_signals(tmp_path: Path) -> None:
    found = learned(tmp_path)
    made = refits(found, tmp_path)
    due = made.due
    found.activate(parse_policy(CLOUD_ONLY))
    made.use(refit=True)
    assert made.due is None
    found.activate(POLICY)
    made.use(refit=True)
    assert made.due == due == ("assistant", found.pairs["assistant"])


async def test_refits_of_other_signals_are_bounded(tmp_path: Path) -> None:
    found = learned(tmp_path)
    refit = Refit("", 3, NOW, 600, 0.1, Correction(), Correction(1.0, -0.5))
    many = [msgspec.structs.replace(refit, signals_sha256=f"{at:064}", at=NOW + at) for at in range(20)]
    (tmp_path / FILE).write_bytes(msgspec.json.encode(many))
    refits(found, tmp_path, count=0)
    assert read_refits(tmp_path) == many[-8:]


async def test_signals_without_golden_answers_are_not_refitted(tmp_path: Path) -> None:
    found = learned(tmp_path, golden=())
    made = refits(found, tmp_path)
    await made.run()
    assert dict(made.results) == {("assistant", "golden"): 1}


@pytest.mark.parametrize("how", ["policy", "file"])
async def test_a_refit_can_be_dropped(tmp_path: Path, how: str) -> None:
    """By a policy without `refit`, and by a file that is gone at the next load of the policy."""
    found = learned(tmp_path)
    made = refits(found, tmp_path)
    await made.run()
    if how == "file":
        (tmp_path / FILE).unlink()
    made.use(refit=how == "file")
    assert score(found, chat(OPEN), SURE) == pytest.approx(0.9)
    assert not (tmp_path / FILE).exists()


async def test_labels_against_a_refit_give_it_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = learned(tmp_path)
    made = refits(found, tmp_path)
    await made.run()
    for label in labels(1.0, count=100):
        made.add(found.pairs["assistant"], label)
    assert "The calibration of assistant is again the one that was shipped: an e-value of " in caplog.text
    assert made.results["assistant", "given_up"] == 1
    assert score(found, chat(OPEN), SURE) == pytest.approx(0.9)
    assert not (tmp_path / FILE).exists()


async def test_a_refit_that_ends_during_a_fit_takes_the_next_one_with_it(tmp_path: Path) -> None:
    """A promise's alarm is about the calibration in use; the next one was fitted to be better than that."""
    found = learned(tmp_path)
    stored(found, tmp_path, offset=0.05)
    loop = asyncio.get_running_loop()

    async def alarmed() -> None:
        made.give_up("a promise raised an alarm")

    def fit(*arguments: object) -> Refit:
        refit = propose(*arguments)  # type: ignore[arg-type]
        assert isinstance(refit, Refit)
        asyncio.run_coroutine_threadsafe(alarmed(), loop).result()
        return refit

    made = refits(found, tmp_path, fit)
    await made.run()
    assert (made.in_use, (tmp_path / FILE).exists()) == ({}, False)
    assert made.results["assistant", "adopted"] == 0
