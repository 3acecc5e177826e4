"""A daemon as a process, with an agent that reads a folder.

`python -m tests.edge_node.agent.daemon_process PUBLISHER CONFIG`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from causeway_server.edge_node.agent.interfaces import AgentSettings, FleetLink
from causeway_server.edge_node.agent.source import FolderSource
from causeway_server.edge_node.agent.trial import TrialSettings
from causeway_server.edge_node.cli.serve import run
from causeway_server.edge_node.config.loader import load_config

from .fleet import Publisher, member

# The latency of a busy machine is not judged; test_trial has that.
TRIAL = TrialSettings(least_s=0.5, least_requests=5, longest_s=3600.0, poll_s=0.1, latency_margin=1.0)


def main() -> None:
    publisher = Publisher(Path(sys.argv[1]), exists=True)
    link = FleetLink(
        member=lambda: member(publisher.root),
        source=FolderSource(publisher.folder),
        settings=AgentSettings(check_interval_s=0.5, retry_s=0.5, trial=TRIAL),
    )
    sys.exit(run(load_config(Path(sys.argv[2]), os.environ, {}), link))


if __name__ == "__main__":
    main()
