"""The teacher's answers: asked at an OpenAI endpoint, several prompts at a time, and stored as they come."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import httpx2
import msgspec

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.comparison.prompts import EvaluationPrompt
from causeway_server.router.errors import BackendError

from ..calibrate.collect import EndpointAnswerer, EndpointRefused, PromptRefused

ANSWERS = "answers.jsonl"
TEMPERATURE = 0.8  # of all samples but the first, which is greedy
TOP_LOGPROBS = 8
_PROGRESS = 25
_REFUSALS = 10  # prompts that are refused before any is answered: none would be


class TeacherToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of an answer with its likeliest alternatives, itself among them, and their log-probabilities."""

    text: str
    top: tuple[tuple[str, float], ...]


class TeacherAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample. `tokens`: empty where the teacher gives no log-probabilities."""

    text: str
    finish_reason: str
    tokens: tuple[TeacherToken, ...] = ()


class TeacherAnswers(msgspec.Struct, frozen=True):
    """All samples of one prompt, the greedy one first; none if the teacher refuses it. `id`: the prompt's."""

    id: str
    samples: tuple[TeacherAnswer, ...]


class TeacherSettings(msgspec.Struct, frozen=True):
    """The settings on which the answers depend: the first line of their file. `system`: a message for the teacher."""

    model: str
    samples: int
    system: str = ""


class TeacherLog:
    """The file of answers, one line for each prompt. Use as a context manager."""

    def __init__(self, path: Path, settings: TeacherSettings) -> None:
        """Open or create `path`; a last line that a killed run left incomplete is cut off.

        Raises:
            ArtifactError: The answers are of other settings, or a line is damaged.
        """
        self.path, self.rows = path, dict[str, TeacherAnswers]()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        lines = path.read_bytes().split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            try:
                if number > 1:
                    row = msgspec.json.decode(line, type=TeacherAnswers)
                    self.rows[row.id] = row
                elif (found := msgspec.json.decode(line, type=TeacherSettings)) != settings:
                    raise ArtifactError(
                        f"{path}: the answers are of {found}, but this run asks {settings}. Name another --run folder."
                    )
            except msgspec.DecodeError as error:
                raise ArtifactError(
                    f"{path}:{number}: {error}. Delete the line, or delete the file to start again."
                ) from error
        self._file = path.open("ab")
        self._file.truncate(sum(len(line) + 1 for line in lines))
        if not lines:
            self._write(settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def is_answered(self) -> bool:
        """Whether a prompt has an answer."""
        return any(row.samples for row in self.rows.values())

    def append(self, row: TeacherAnswers) -> None:
        """Add a row; it is on the disk when this returns."""
        self.rows[row.id] = row
        self._write(row)

    def _write(self, value: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


class Teacher(EndpointAnswerer):
    """A teacher behind an endpoint such as ``https://host/v1``. Use as an async context manager."""

    def __init__(
        self,
        url: str,
        settings: TeacherSettings,
        key: str = "",
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(url, settings.model, key, pause, timeout_s)
        self._settings = settings
        self._gives_logprobs = True  # until it refuses them

    async def ask(self, prompt: EvaluationPrompt) -> TeacherAnswers:
        """Return the teacher's samples.

        Raises:
            BackendError: The teacher cannot be reached, refuses the request, or sends something else than an answer.
        """
        samples = [await self._sample(prompt, number) for number in range(self._settings.samples)]
        return TeacherAnswers(prompt.id, tuple(samples))

    async def _sample(self, prompt: EvaluationPrompt, number: int) -> TeacherAnswer:
        system = [{"role": "system", "content": self._settings.system}] if self._settings.system else []
        body: dict[str, object] = {
            "model": self._settings.model,
            "messages": [*system, {"role": "user", "content": prompt.question}],
            "max_tokens": prompt.answer_tokens,
            "temperature": TEMPERATURE if number else 0,
            "seed": number,
        }
        if self._gives_logprobs:
            try:
                return _parse(await self.post({**body, "logprobs": True, "top_logprobs": TOP_LOGPROBS}))
            except EndpointRefused:
                response = await self.post(body)
                self._gives_logprobs = False  # they were refused, not the prompt
                return _parse(response)
        return _parse(await self.post(body))


def _parse(response: httpx2.Response) -> TeacherAnswer:
    """Raise BackendError if it is not a chat completion."""
    try:
        body: Any = response.json()
        choice = body["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        return TeacherAnswer(
            text=str(choice["message"]["content"] or ""),
            finish_reason=str(choice["finish_reason"]),
            tokens=tuple(
                TeacherToken(one["token"], tuple((top["token"], float(top["logprob"])) for top in one["top_logprobs"]))
                for one in content
            ),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BackendError(
            f"The teacher sent something other than a chat completion: {response.text[:200]}", phase="stream"
        ) from error


async def ask_all(
    prompts: Sequence[EvaluationPrompt],
    teacher: Teacher,
    log: TeacherLog,
    *,
    parallel: int,
    progress: Callable[[str], None],
) -> None:
    """Ask the teacher each prompt that `log` has no answers to. Those that it refuses, but not all, get no samples.

    Raises:
        BackendError: The teacher failed, or answers nothing. The answers so far are stored, and a second call resumes.
    """
    waiting = iter([prompt for prompt in prompts if prompt.id not in log.rows])
    refused: dict[str, PromptRefused] = {}

    async def ask() -> None:
        for prompt in waiting:
            try:
                log.append(await teacher.ask(prompt))
            except PromptRefused as error:
                refused[prompt.id] = error
                if len(refused) >= _REFUSALS and not log.is_answered:
                    raise
                continue
            if len(log.rows) % _PROGRESS == 0:
                progress(f"The teacher has answered {len(log.rows)} of {len(prompts)} prompts.")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(ask())
    except BaseExceptionGroup as failed:
        gone, others = failed.split(BackendError)
        if gone is None or others is not None:
            raise
        raise gone.exceptions[0] from failed
    if refused:
        *_, error = refused.values()
        if not log.is_answered:
            raise error
        for key in refused:
            log.append(TeacherAnswers(key, ()))
        progress(f"Prompts that the teacher refuses, which are left out: {len(refused)}. {error.message}")
