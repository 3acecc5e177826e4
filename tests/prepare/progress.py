"""The steps of a set-up: finding pending steps, running their programs, and showing the progress."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

QUIET_S = 10.0  # interval of lines in seconds, if the output is not a terminal
KILL_AFTER_S = 5.0
_TAIL_LINES = 15


class Watch(Protocol):
    """Returns the text to show for a line of output; None for no text."""

    def __call__(self, line: str, /) -> str | None: ...


class StepFailed(Exception):
    """A step failed. `advice` tells the user how to fix it, `tail` holds the last lines of its log."""

    def __init__(self, fault: str, advice: str = "", tail: str = "", log: Path | None = None) -> None:
        super().__init__(fault)
        self.fault = fault
        self.advice = advice
        self.tail = tail
        self.log = log


class Progress:
    """Shows progress in a line that is rewritten in place on a terminal; elsewhere (CI) in a new line at intervals."""

    def __init__(self, out: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._now = now
        self._live = out.isatty()
        self._head = ""
        self._began = 0.0
        self._shown = 0.0

    def begin(self, head: str, title: str) -> None:
        self._head = head
        self._began = self._shown = self._now()
        self._write(f"{head} {title} ...")

    def show(self, detail: str) -> None:
        now = self._now()
        if self._live or now - self._shown >= QUIET_S:
            self._shown = now
            self._write(f"{self._head} {detail} ({now - self._began:.0f} s)")

    def end(self, words: str) -> None:
        self._write(f"{self._head} {words} ({self._now() - self._began:.1f} s)")
        if self._live:
            self._out.write("\n")
            self._out.flush()

    def _write(self, line: str) -> None:
        if self._live:
            width = os.get_terminal_size(self._out.fileno()).columns or 80
            self._out.write("\r\x1b[K" + line[: width - 1])
        else:
            self._out.write(line + "\n")
        self._out.flush()


def consent(needs: str) -> None:
    """Say what something needs, and ask whether to go on. Raises StepFailed if not."""
    print(needs, flush=True)
    if os.environ.get("YES"):
        return
    try:
        agreed = input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        agreed = False
    if not agreed:
        raise StepFailed("Nothing was built.", "YES=1 answers the question: make YES=1 ...")


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for pip and cmake, without variables that would point outside our own environments."""
    astray = {
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "PIP_USER",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_REQUIRE_VIRTUALENV",
    }
    kept = {name: value for name, value in environ.items() if name not in astray}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    environ: Mapping[str, str] | None = None,
    watch: Watch = lambda _line: None,
    progress: Progress | None = None,
    advice: str = "",
    cwd: Path | None = None,
) -> None:
    """Run a program, with all its output in `log`, and show the result of `watch` for each line.

    Without `environ` the program gets that of `child_environment`. It has its own process group, and leaving by any
    exception (Ctrl-C is one) ends the whole group, so that no compiler is left running. Raises StepFailed if the
    program cannot start or does not exit with 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8", errors="replace") as record:
        try:
            child = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(child_environment(os.environ) if environ is None else environ),
                cwd=cwd,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise StepFailed(f"Cannot start {command[0]}: {error.strerror}", advice) from error
        try:
            assert child.stdout is not None
            for line in child.stdout:
                record.write(line)
                detail = watch(line)
                if detail is not None and progress is not None:
                    progress.show(detail)
            status = child.wait()
        except BaseException:
            _end_group(child)
            raise
    if status != 0:
        name = Path(str(command[0])).name
        raise StepFailed(f"{name} ended with status {status}.", advice, _tail(log), log)


def _end_group(child: subprocess.Popen[str]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(timeout=KILL_AFTER_S)
            return
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])


@dataclass(frozen=True)
class Step:
    """A step of a set-up.

    `key` is a hash of everything on which the result depends; `there` is a cheap check that the result still exists;
    `work` makes the result and returns the text of the closing line. A step whose stamp matches its key, and whose
    result exists, is skipped.
    """

    title: str
    stamp: Path
    key: str
    there: Callable[[], bool]
    work: Callable[[Progress], str]

    def is_current(self) -> bool:
        try:
            return self.stamp.read_text(encoding="utf-8") == self.key and self.there()
        except OSError:
            return False

    def mark(self) -> None:
        """Write the stamp atomically."""
        self.stamp.parent.mkdir(parents=True, exist_ok=True)
        draft = self.stamp.with_suffix(".draft")
        draft.write_text(self.key, encoding="utf-8")
        draft.replace(self.stamp)


def carry_out(steps: Sequence[Step], progress: Progress) -> int:
    """Run the pending steps in order, and return how many there were. Raises the errors of the steps."""
    done = 0
    for number, step in enumerate(steps, start=1):
        if step.is_current():
            continue
        step.stamp.unlink(missing_ok=True)
        progress.begin(f"[{number}/{len(steps)}]", step.title)
        words = step.work(progress)
        step.mark()
        progress.end(words)
        done += 1
    return done


def digest(*parts: str | bytes | Path) -> str:
    """Return the SHA-256, in hex, of texts and of files' contents, in this order."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()
