"""The functions that the assistants may call: the intents of four public data sets under common names.

HWU64 keeps its names (`alarm_set`), SNIPS becomes snake case, BANKING77 is prefixed with `bank_`. A CLINC150 intent
that is the same function as one of the others is merged into it; its rows have no slots, so they train and test only
the function's name.
"""

from __future__ import annotations

import re

from causeway_server.router.documents.data import table_of

OUT_OF_SCOPE = "out_of_scope"
LABELLED = "labelled"  # source of pseudo-labelled rows; their intents are function names already

SNIPS = {
    "AddToPlaylist": "playlist_add",
    "BookRestaurant": "restaurant_book",
    "GetWeather": "weather_get",
    "PlayMusic": "music_play",
    "RateBook": "book_rate",
    "SearchCreativeWork": "creative_work_search",
    "SearchScreeningEvent": "screening_search",
}

# CLINC150 intent → the functions that answer it correctly.
CLINC_MERGED = table_of(__package__, "clinc_merged.json", dict[str, tuple[str, ...]])

DEVICE_DOMAINS = ("iot", "audio", "alarm", "lists", "calendar", "weather", "play", "music", "datetime")
# CLINC150 intents that are too close to the device's functions to be trained as refusals.
DEVICE_LIKE = frozenset(
    {"timer", "timezone", "next_song", "meeting_schedule", "schedule_meeting", "next_holiday", "restaurant_suggestion"}
    | {"cancel_reservation", "confirm_reservation", "change_speed", "sync_device"}
)


def functions_for(source: str, intent: str) -> tuple[str, ...]:
    """Return the functions that answer a row; the first one is the training target.

    Args:
        source: hwu64, snips2017, clinc150, banking77, or LABELLED.
        intent: the row's intent.
    """
    if source == "snips2017":
        return (SNIPS[intent],)
    if source == "banking77":
        return (f"bank_{intent.lower().rstrip('?')}",)
    if source == "clinc150":
        return CLINC_MERGED.get(intent, (intent,))
    return (intent,)


def argument_name(slot: str) -> str:
    """Convert a slot's name: `timeRange` → `time_range`."""
    return re.sub(r"(?<=[a-z])([A-Z])", lambda match: "_" + match.group(1).lower(), slot)


def is_device_row(source: str, intent: str) -> bool:
    """Return whether the device's model answers a row: a row of SNIPS, of HWU64's device domains, or
    pseudo-labelled.
    """
    return source in ("snips2017", "hwu64", LABELLED) and is_device_function(functions_for(source, intent)[0])


def is_device_function(name: str) -> bool:
    """Return whether the device's model answers with this function."""
    return name in SNIPS.values() or name.split("_")[0] in DEVICE_DOMAINS


def is_refusable(source: str, intent: str) -> bool:
    """Return whether the device's model should refuse a row: its function is neither the model's own nor close to one
    of those.
    """
    if is_device_row(source, intent):
        return False
    if source != "clinc150":
        return True
    return intent not in DEVICE_LIKE and not any(is_device_function(name) for name in CLINC_MERGED.get(intent, ()))
