"""The child that a worker runs in: it may die, hang and grow, and the next job is answered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from causeway_server.models.parts.process.messages import AudioSamples, Decode, Found, Refusal, Transcribe, WorkerSpec
from causeway_server.models.parts.process.parent import WorkerFailed, WorkerProcess, WorkerTimeout
from tests.jumping_loop import JumpingLoop, run_jumping
from tests.waiting import until

pytestmark = pytest.mark.slow

WAIT_S = 60.0


@pytest.fixture
async def worker() -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(WorkerSpec("tests.models.parts.workers:Scripted", memory_bytes=128 * 1024 * 1024))
    yield process
    await process.close()


def soon() -> float:
    return asyncio.get_running_loop().time() + WAIT_S


def kill(pid: int) -> None:
    """Kill a child of this process, and return when it is dead."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def answers(worker: WorkerProcess, data: bytes = b"good") -> bool:
    return await worker.run(Decode("audio", data), soon()) == AudioSamples(data)


async def test_no_child_runs_before_the_first_job(worker: WorkerProcess) -> None:
    assert worker.pid is None
    assert await answers(worker)
    assert worker.pid is not None


async def test_the_child_has_no_secret_of_the_daemons(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what others sent: a fault of a decoder must reveal no key."""
    monkeypatch.setenv("CAUSEWAY_CLOUDS__MAIN__KEY", "secret")  # the environment is what is under test
    assert await answers(worker)
    environ = psutil.Process(worker.pid).environ()
    assert "PATH" in environ
    assert "secret" not in environ.values()


async def test_a_child_that_dies_fails_its_job_and_the_next_one_gets_a_new_child(worker: WorkerProcess) -> None:
    with pytest.raises(WorkerFailed):
        await worker.run(Decode("audio", b"die"), soon())
    assert await answers(worker)
    assert worker.starts == 2


async def test_a_child_that_was_killed_between_jobs_is_replaced(worker: WorkerProcess) -> None:
    assert await answers(worker)
    assert worker.pid is not None
    kill(worker.pid)
    assert await answers(worker)
    assert worker.starts == 2


def test_a_job_that_hangs_ends_at_its_deadline_with_its_child(caplog: pytest.LogCaptureFixture) -> None:
    async def hang(loop: JumpingLoop) -> None:
        worker = WorkerProcess(WorkerSpec("tests.models.parts.workers:Scripted"))
        assert await answers(worker)
        pid = worker.pid
        assert pid is not None
        job = asyncio.create_task(worker.run(Decode("audio", b"hang"), soon()))
        await asyncio.sleep(0)  # the child has it
        loop.jump()
        with pytest.raises(WorkerTimeout):
            await job
        loop.jump()  # and does not end by itself
        assert await answers(worker)
        assert not psutil.pid_exists(pid)
        await worker.close()

    run_jumping(hang)
    assert "Scripted hung: its process is replaced 2 s after its job was cancelled" in caplog.text


async def test_a_cancelled_job_drops_its_result_and_keeps_its_child() -> None:
    worker = WorkerProcess(WorkerSpec("tests.models.parts.workers:Scripted"), settle_s=WAIT_S)
    assert await answers(worker)
    for _ in range(3):
        job = asyncio.create_task(worker.run(Decode("audio", b"work"), soon()))
        waiting = asyncio.create_task(worker.run(Decode("audio", b"next"), soon()))
        await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert await waiting == AudioSamples(b"next")
    assert worker.starts == 1
    await worker.close()


def test_a_child_goes_on_loading_for_the_next_job_when_the_first_one_is_late(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def load(loop: JumpingLoop) -> None:
        worker = slow_to_load(gate)
        first = asyncio.create_task(worker.run(Transcribe(AudioSamples(bytes(8))), soon()))
        await until(lambda: worker.pid)
        loop.jump()
        with pytest.raises(WorkerTimeout):
            await first
        next_one = asyncio.create_task(worker.run(Transcribe(AudioSamples(bytes(8))), soon()))
        await asyncio.to_thread(gate.write_bytes, b"x")
        assert isinstance(await next_one, Found)
        assert worker.starts == 1
        await worker.close()

    run_jumping(load)


def test_a_child_that_never_loads_is_replaced(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def load(loop: JumpingLoop) -> None:
        never = slow_to_load(gate)
        job = asyncio.create_task(never.run(Transcribe(AudioSamples(bytes(8))), loop.time() + 10 * WAIT_S))
        await until(lambda: never.pid)
        loop.jump(2 * WAIT_S)
        with pytest.raises(WorkerFailed, match="did not load"):
            await job
        assert never.pid is None

    run_jumping(load)


def slow_to_load(gate: Path) -> WorkerProcess:
    options = {"gate": str(gate), "text": "hello", "fault": ""}
    return WorkerProcess(WorkerSpec("tests.models.parts.workers:SlowToLoad", options=options))


async def test_ten_jobs_at_once_share_one_child_and_each_gets_its_own_result(worker: WorkerProcess) -> None:
    jobs = [worker.run(Decode("audio", b"%d" % at), soon()) for at in range(10)]
    assert await asyncio.gather(*jobs) == [AudioSamples(b"%d" % at) for at in range(10)]
    assert worker.starts == 1


async def test_memory_is_bounded_and_a_refusal_is_the_clients_error(worker: WorkerProcess) -> None:
    with pytest.raises(Refusal, match="memory"):
        await worker.run(Decode("audio", b"grow"), soon())
    with pytest.raises(Refusal, match="it is wrong"):
        await worker.run(Decode("audio", b"refuse"), soon())
    assert await answers(worker)
    assert worker.starts == 1


async def test_a_child_writes_no_files(worker: WorkerProcess) -> None:
    with pytest.raises(WorkerFailed):
        await worker.run(Decode("audio", b"write"), soon())
    assert await answers(worker)


async def test_a_worker_that_cannot_be_made_fails_each_job_and_a_closed_one_starts_nothing() -> None:
    broken = WorkerProcess(WorkerSpec("tests.models.parts.workers:Broken"))
    with pytest.raises(WorkerFailed):
        await broken.run(Decode("audio", b""), soon())
    await broken.close()
    with pytest.raises(WorkerFailed, match="closed"):
        await broken.run(Decode("audio", b""), soon())
    assert broken.pid is None
