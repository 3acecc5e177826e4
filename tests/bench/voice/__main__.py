"""`make demo-voice`: commands spoken by espeak-ng, transcribed by Whisper, answered by the device's assistant.

    python -m tests.bench voice [--data data/intents/hwu64.jsonl] [--rows 100] [--voices en-us,en-gb,en-gb-scotland]

Needs the extra `voice`, `causeway-models pull speech`, and espeak-ng. The speech is synthetic, and said to be. Prints
word error rate, exact match of the calls beside that of the typed text, what a handoff keeps on the device with the
calibrator as it is for typed requests and for spoken ones, times, and the traffic to other machines, which is watched
for the whole run. Without `--data` it speaks own sentences, written for this demonstration; with rows of HWU64, those
of the held-back half that the calibrator was not fitted on.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from pathlib import Path

from causeway_server.models.catalog.artifact import ArtifactError
from tests.tool import run_tool

from .measure import FORMAT, run
from .network import isolate


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench voice", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="JSON lines labelled as HWU64's; by default own sentences")
    parser.add_argument("--rows", type=int, default=100, help="at most so many commands")
    parser.add_argument("--voices", default="en-us,en-gb,en-gb-scotland")
    parser.add_argument("--espeak", default="espeak-ng", help="command of espeak-ng, with its options")
    arguments = parser.parse_args()
    if arguments.data is not None and not arguments.data.is_file():
        sys.exit(f"{arguments.data}: no such file. {FORMAT}")
    if arguments.rows < 1:
        parser.error("--rows must be at least 1")
    if shutil.which(arguments.espeak.split()[0]) is None:
        sys.exit(f"{arguments.espeak.split()[0]}: not found. Install espeak-ng: apt install espeak-ng")
    watch = isolate("tests.bench.voice", sys.argv[1:])
    try:
        asyncio.run(run(arguments, watch))
    except ArtifactError as error:
        sys.exit(f"{error}. {FORMAT}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
