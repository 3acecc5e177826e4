"""Speech detection for live sessions: in a child of its own, so that it never waits for a transcript."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from router.errors import EncoderFailed

from ..process.messages import DetectSpeech, Refusal, SpeechProbabilities, WorkerSpec
from ..process.parent import WorkerFailed, WorkerProcess

log = logging.getLogger(__name__)

_START_S = 60.0  # of a child that loads its model first, on a machine that does much else
_TIMEOUT_S = 10.0  # a window takes a millisecond


class SpeechDetection:
    """Serves all sessions; the child starts with the first sound.

    Args:
        spec: the detector.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._worker = WorkerProcess(spec)
        self._timeout_s = _START_S

    async def run(self, pcm: bytes, state: bytes) -> tuple[Sequence[float], bytes]:
        """Return the probability of speech in each window, and the state for those that follow.

        Args:
            pcm, state: as `DetectSpeech`.

        Raises:
            EncoderFailed: it is not known in time.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            found = await self._worker.run(DetectSpeech(pcm, state), deadline)
        except (WorkerFailed, Refusal) as error:
            self._timeout_s = _START_S  # the next one may begin in a new child
            log.warning("speech was not looked for: %s", error)
            raise EncoderFailed(f"turns cannot be detected now: {error}. Send on, or commit the sound.") from None
        assert isinstance(found, SpeechProbabilities)
        self._timeout_s = _TIMEOUT_S
        return found.windows, found.state

    async def close(self) -> None:
        """End the child."""
        await self._worker.close()
