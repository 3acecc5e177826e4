"""The section `parts` of the gateway's configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from router.serving.config import Seconds

NO_SOUND = "this gateway understands no sound: have its operator configure an encoder (a tier that `can: [audio]`)."


class PartsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sounds, pictures and files in requests, which encoder tiers (`can: [audio]`, `[image]`, `[file]`) read."""

    max_parts: Annotated[int, Meta(ge=1)] = 8  # sounds, pictures and files of one request
    audio_timeout_s: Seconds = 20.0  # for each sound, the wait included; then the answer does without it
    image_timeout_s: Seconds = 10.0  # for each picture or file, the wait included
    # language of sounds where the request names none, as `en`; empty: each sound's is found out
    language: Annotated[str, Meta(pattern=r"^([a-z]{2,3})?$")] = ""
    remembered: Annotated[int, Meta(ge=0)] = (
        256  # sounds and pictures whose facts are kept in memory, for one tenant each
    )
    remembered_s: Seconds = 600.0  # how long
