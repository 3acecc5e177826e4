"""A daemon whose background task fails: python -m tests.edge_node.cli.failing_daemon CONFIG."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from causeway_server.edge_node.agent.interfaces import FleetLink
from causeway_server.edge_node.agent.source import FolderSource
from causeway_server.edge_node.cli.serve import run
from causeway_server.edge_node.config.loader import load_config


def fail() -> NoReturn:
    raise RuntimeError("a fault of ours")


def main() -> None:
    link = FleetLink(member=fail, source=FolderSource(Path("/nowhere")), on_change=fail)
    sys.exit(run(load_config(Path(sys.argv[1]), os.environ, {}), link))


if __name__ == "__main__":
    main()
