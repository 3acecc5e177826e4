"""A tier of the gateway whose Triton does not exist: no request gets that far.

Its chat template is a file, because reading the shipped artifact's takes 0.2 s in each test.
"""

from __future__ import annotations

from pathlib import Path

from causeway_server.cloud_pool.tiers.config import TierConfig


def unreachable_tier(name: str = "large") -> TierConfig:
    template = Path(__file__).with_name("plain.jinja")
    return TierConfig(name=name, template_file=str(template), context_tokens=2048, triton="127.0.0.1:1")
