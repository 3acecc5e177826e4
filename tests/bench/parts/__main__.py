"""`python -m tests.bench parts WHAT`: what a request with an audio clip and an image costs.

- paced: encoders that take a given time, the shipped assistant; needs Pillow (extra `images`)
- real: Whisper, PP-OCRv4 and a brought model; needs the extras, `causeway-models pull speech` and espeak-ng
- invoice (`make demo-invoice`): a rendered and a distorted invoice (synthetic), questions typed and spoken, a stalled
  branch; as `real`
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.tool import run_tool

from . import invoice, side_by_side


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench parts", description=__doc__)
    parser.add_argument("what", choices=("paced", "real", "invoice"))
    parser.add_argument("--model", default="qwen-05b", help="a brought model that answers in words")
    parser.add_argument("--models", type=Path, action="append", default=[], help="folder of brought models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--espeak", default="espeak-ng", help="command of espeak-ng, with its options")
    arguments = parser.parse_args()
    if arguments.what == "paced":
        holds = asyncio.run(side_by_side.paced(arguments.rounds))
    elif arguments.what == "real":
        holds = asyncio.run(side_by_side.real(arguments.model, arguments.models, arguments.espeak, arguments.rounds))
    else:
        holds = asyncio.run(invoice.run(arguments.model, arguments.models, arguments.espeak))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    sys.exit(run_tool(main))
