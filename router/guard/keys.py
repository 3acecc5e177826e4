"""Keys of large clouds, forges and model services, in the forms that their vendors document for secret scanning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_PRIVATE_KEY: Final = (  # whole, or cut off
    r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----"
    r"(?:[\s\S]{0,8192}?-----END [A-Z ]{0,20}KEY-----|[A-Za-z0-9+/=\s\\]{0,8192})"
)
# A marker that each such key contains, and the key. The marker is searched first, because that costs next to nothing.
_FORMS: Final = (
    *((mark, rf"\b{mark}[A-Z2-7]{{16}}\b") for mark in ("AKIA", "ASIA")),  # AWS: an access key, and a temporary one
    ("aws_secret", r"(?i:aws_secret_access_key)[\"']?\s*[=:]\s*[\"']?([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])"),
    ("AWS_SECRET", r"AWS_SECRET_ACCESS_KEY[\"']?\s*[=:]\s*[\"']?([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])"),
    ("AIza", r"\bAIza[\w-]{35}(?![\w-])"),  # Google
    ("GOCSPX-", r"\bGOCSPX-[\w-]{28}(?![\w-])"),
    ("ya29.", r"\bya29\.[\w-]{20,512}"),
    ("AccountKey=", r"AccountKey=([A-Za-z0-9+/]{86}==)"),  # Azure: storage, and an application's secret
    ("8Q~", r"(?<![\w~.-])[\w~.-]{3}8Q~[\w~.-]{34}(?![\w~.-])"),
    ("7Q~", r"(?<![\w~.-])[\w~.-]{3}7Q~[\w~.-]{31}(?![\w~.-])"),
    ("LTAI", r"\bLTAI[A-Za-z0-9]{12,20}\b"),  # Alibaba
    ("dop_v1_", r"\bdop_v1_[0-9a-f]{64}\b"),  # DigitalOcean
    *((mark, rf"\b{mark}[A-Za-z0-9]{{36,251}}\b") for mark in ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),  # GitHub
    ("github_pat_", r"\bgithub_pat_[A-Za-z0-9_]{60,251}\b"),
    ("glpat-", r"\bglpat-[\w-]{20,300}(?:\.[\w-]{2,10}){0,2}"),  # GitLab
    ("ATATT3x", r"\bATATT3x[\w=-]{50,250}"),  # Atlassian, Bitbucket
    ("ATBB", r"\bATBB[A-Za-z0-9]{32}\b"),
    ("npm_", r"\bnpm_[A-Za-z0-9]{36}\b"),
    ("pypi-AgE", r"\bpypi-AgE[\w-]{50,500}"),
    ("xox", r"\bxox[abeoprs]-[\w-]{10,250}"),  # Slack
    ("_live_", r"\b[rs]k_live_[A-Za-z0-9]{20,250}\b"),  # Stripe
    ("sk-", r"(?<![\w-])sk-(?:proj-|svcacct-|ant-[a-z0-9]+-|or-v1-)?[\w-]{32,250}"),  # model services
    ("hf_", r"\bhf_[A-Za-z]{34}\b"),
    ("eyJ", r"(?<![\w-])eyJ[\w-]{10,2000}\.eyJ[\w-]{10,4000}\.[\w-]{16,1000}"),  # a signed token (RFC 7515)
    ("-----BEGIN", _PRIVATE_KEY),
    ("://", r"\b[a-z][a-z0-9+.-]{1,15}://[^\s:/@]{0,64}:([^\s/@]{1,128})@"),  # a password in a URL
)  # fmt: skip
# What several markers have in common, or few texts have, is searched before them: single characters cost the least.
_COMMON: Final = ("_", "~", "=", "J", "X", "x", "B", "/", "-", "IA", "AI", "AT", "")
_PATTERNS: Final = [(marker, re.compile(pattern)) for marker, pattern in _FORMS]
_KEYS: Final = tuple(
    (common, [form for form in _PATTERNS if common == next(one for one in _COMMON if one in form[0])])
    for common in _COMMON
)


def find_keys(text: str) -> Iterator[tuple[int, int]]:
    """Yield the places of keys, not in order. Those of two forms may overlap."""
    for common, forms in _KEYS:
        if common in text:
            for marker, pattern in forms:
                if marker in text:
                    for match in pattern.finditer(text):
                        yield match.span(match.lastindex or 0)
