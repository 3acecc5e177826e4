"""A step of the set-up, its stamp, and the loop that does what is not done yet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .progress import Progress


@dataclass(frozen=True)
class Step:
    """One piece of set-up.

    `key` is a hash of all that the result depends on; `there` is cheap proof that the result still exists; `work`
    makes it and returns the words for the closing line. A step whose stamp holds its key, and whose result is there,
    is passed over.
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
        """Leaves the stamp, whole or not at all."""
        self.stamp.parent.mkdir(parents=True, exist_ok=True)
        draft = self.stamp.with_suffix(".draft")
        draft.write_text(self.key, encoding="utf-8")
        draft.replace(self.stamp)


def carry_out(steps: Sequence[Step], progress: Progress) -> int:
    """Does the steps that are not current, in order, and returns how many there were. Raises what a step raises."""
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
    """SHA-256, in hex, of texts and of files' contents; the order counts."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()
