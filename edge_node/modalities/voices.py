"""The processes of the Piper voices that an owner added: started with the first text, ended when they are idle.

At most `loaded` voices are in memory. A text for another one waits until one of them has nothing to do, and takes its
place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from models.catalog.artifact import ArtifactError
from models.modalities.process.parent import WorkerProcess
from models.modalities.voices.files import Voice, find_voice, list_voices, worker_spec

log = logging.getLogger(__name__)

IDLE_S = 300.0
"""Time after which the process of a voice that nothing asks for is ended."""
LOADED = 2
SEPARATOR = "+"
"""Between a voice and one of its speakers, as between a model and an adapter."""


class _VoiceProcess:
    """The process of one version of a voice. `uses`: texts that it speaks now."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.uses = 0
        self.ends: asyncio.TimerHandle | None = None


class Voices:
    """The voices in `model_dirs` and the account's own folder.

    Args:
        memory_bytes: what the process of a voice may take.
    """

    def __init__(
        self,
        model_dirs: Sequence[Path],
        *,
        idle_s: float = IDLE_S,
        loaded: int = LOADED,
        memory_bytes: Callable[[Voice], int] = lambda voice: voice.memory_bytes,
    ) -> None:
        self._model_dirs = model_dirs
        self._idle_s = idle_s
        self._limit = loaded
        self._memory_bytes = memory_bytes
        self._loaded: dict[tuple[Path, str], _VoiceProcess] = {}  # the longest unused one first
        self._changed = asyncio.Condition()
        self._ending: set[asyncio.Task[None]] = set()
        self._former_starts = 0

    @property
    def starts(self) -> int:
        """Processes started so far."""
        return self._former_starts + sum(one.worker.starts for one in self._loaded.values())

    @property
    def running(self) -> int:
        """Processes that are there."""
        return sum(one.worker.pid is not None for one in self._loaded.values())

    @property
    def busy(self) -> int:
        """Sentences that are spoken now."""
        return sum(one.worker.busy for one in self._loaded.values())

    def names(self) -> tuple[str, ...]:
        """Return the names of the voices that are here now."""
        try:
            return tuple(one.name for one in list_voices(self._model_dirs))
        except ArtifactError as error:
            log.warning("the voices cannot be listed: %s", error)
            return ()

    def find(self, name: str) -> tuple[Voice, str] | None:
        """Return the voice that ``VOICE`` or ``VOICE+SPEAKER`` names, with the speaker's name; None if there is none.

        Raises:
            ArtifactError: its files are missing, malformed or altered.
        """
        base, _, speaker = name.partition(SEPARATOR)
        voice = find_voice(base, self._model_dirs)
        return None if voice is None else (voice, speaker)

    @contextlib.asynccontextmanager
    async def using(self, voice: Voice, deadline: float) -> AsyncIterator[WorkerProcess]:
        """Hold the process of a voice; it starts with its first job.

        Args:
            deadline: to wait for a place, in the loop's time.

        Raises:
            TimeoutError: other voices spoke until then.
        """
        key = (voice.path, voice.sha256)
        async with asyncio.timeout_at(deadline), self._changed:
            await self._changed.wait_for(lambda: key in self._loaded or self._has_place())
            one = self._loaded.pop(key, None) or await self._load(voice)
            self._loaded[key] = one
            one.uses += 1
        if one.ends is not None:
            one.ends.cancel()
            one.ends = None
        try:
            yield one.worker
        finally:
            one.uses -= 1
            if not one.uses:
                one.ends = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle, key)
            await asyncio.shield(self._tell())

    async def close(self) -> None:
        """End all processes."""
        for one in self._loaded.values():
            if one.ends is not None:
                one.ends.cancel()
            await one.worker.close()
        if self._ending:
            await asyncio.wait(self._ending)

    def _has_place(self) -> bool:
        return len(self._loaded) < self._limit or any(not one.uses for one in self._loaded.values())

    async def _load(self, voice: Voice) -> _VoiceProcess:
        """Make room, and return the process of a voice, which is not started yet."""
        if len(self._loaded) >= self._limit:
            await self._remove(next(key for key, one in self._loaded.items() if not one.uses)).close()
        spec = worker_spec(voice.path, voice.sha256, voice.settings, self._memory_bytes(voice))
        return _VoiceProcess(WorkerProcess(spec))

    def _remove(self, key: tuple[Path, str]) -> WorkerProcess:
        one = self._loaded.pop(key)
        if one.ends is not None:
            one.ends.cancel()
        self._former_starts += one.worker.starts
        return one.worker

    def _end_idle(self, key: tuple[Path, str]) -> None:
        task = asyncio.get_running_loop().create_task(self._remove(key).close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
