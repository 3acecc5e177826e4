"""The words that two questions must share before similarity counts: numbers, units, names, negation, quotes and so on.

`Protector.signature` collects it; two texts with different signatures never share an answer. A word that is not known
to be harmless counts as a name, so an unknown word always separates two texts. `poles` finds opposites: two texts
conflict if one is at the one end of a scale (up, increase, louder) and the other at the other end (down, lower).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Set as AbstractSet

from .words import quoted, words

_NEGATIONS = """
not no never none nobody nothing nowhere neither nor without hardly barely except excluding exclude lacking lack nope
nah only unless unable avoid against minus off before after until till than versus vs always sometimes rarely everyone
anyone someone twice double triple half quarter dozen hundred thousand million billion wrong incorrect false
impossible illegal unhappy unsafe unread should might must previous
"""
# The order of these counts as well.
_ORDERED = """
percent degree celsius fahrenheit kelvin dollar euro pound yen cent penny rupee km kilometer kilometre mile meter
metre cm centimeter mm inch foot feet yard kg kilogram gram ounce oz lb ton liter litre ml gallon cup pint quart
tablespoon teaspoon kb mb gb tb byte plus multiply multiplied divide divided subtract square root power ii iii iv vi
vii viii ix xi xii minute hour day week weekend weekday month year today tomorrow yesterday tonight morning afternoon
evening night noon midnight daily weekly monthly yearly hourly monday tuesday wednesday thursday friday saturday
sunday january february march april june july august september october november december spring summer autumn winter
english spanish french german italian chinese japanese korean russian arabic portuguese hindi dutch red green blue
yellow white black orange purple pink north south east west husband wife mother father mom dad brother sister son
daughter uncle aunt him her he she
"""
# Each line is a scale: its one end, and its other end.
_SCALES = """
on enable activate connect start begin / off disable deactivate disconnect stop end
up increase raise rise rose louder loud brighter brighten bright higher high more warmer warm heat hotter hot maximum max gain most highest top above over / down decrease lower reduce fall fell quieter quiet dim dimmer darker darken dark low less fewer cooler cool colder cold minimum min lose least lowest bottom below under few
open opened / close closed shut
lock block / unlock unblock
mute / unmute
play resume start continue / pause stop end cancel
add put insert create set book schedule make subscribe join keep save install / remove delete take erase clear cancel unsubscribe leave discard uninstall
follow / unfollow
enter login / exit leave logout
in inside into indoor / out outside outdoor
accept approve agree allow confirm yes yeah yep / decline reject disagree deny refuse no nope nah
buy bought borrow receive get earn earned income import download arrive arrival deposit / sell sold lend send give spend spent expense export upload depart departure withdraw
encrypt / decrypt
win won succeed succeeded / lose lost fail failed
like love advantage pro good best better right correct true safe possible legal happy / dislike hate disadvantage con bad worst worse wrong incorrect false dangerous impossible illegal unhappy
cheap cheaper cheapest / expensive
big bigger biggest large larger largest tall taller tallest long longer longest / small smaller smallest short shorter shortest
fast faster fastest / slow slower slowest
old older oldest / new newer newest young younger youngest latest
early earlier earliest / late later latest
left / right
front forward next / back backward previous last
before / after
first / last
full / empty
ascending / descending
with including include / without excluding exclude lacking
my mine our / your yours
some any something all everything everyone / none nothing nobody no
each every always often daily / never rarely seldom
once / twice
first / second third
morning / evening night
show display / hide
inside / outside
near nearest / far farther
future will tomorrow / past was were did yesterday
"""  # noqa: E501 -- one scale per line
_ASKED = {"who": "who", "whom": "who", "whose": "who", "when": "when", "where": "where", "why": "why", "which": ""}
_MEASURES = frozenset("many much old long far tall big often fast high heavy deep large soon late expensive".split())
_CAPITALIZED = re.compile(r"(?<=[\w,;] )[A-Z][\w'-]*")
_ROLES = frozenset("from than versus vs between".split())


def _found(listed: str) -> frozenset[str]:
    """Return listed words as `words` finds them in a text."""
    return frozenset(word for one in listed.split() for word in words(one))


NEGATIONS, ORDERED = _found(_NEGATIONS), _found(_ORDERED)
SCALES = tuple(
    (_found(one), _found(other)) for one, _, other in [line.partition(" / ") for line in _SCALES.strip().splitlines()]
)
_POLES: dict[str, int] = {}  # per word: two bits per scale
for _number, (_one, _other) in enumerate(SCALES):
    for _end, _words in ((1, _one), (2, _other)):
        for _word in _words:
            _POLES[_word] = _POLES.get(_word, 0) | _end << 2 * _number
_ONES = sum(1 << 2 * number for number in range(len(SCALES)))

Signature = tuple[object, ...]


def signature(text: str, found: list[str], harmless: AbstractSet[str]) -> Signature:
    """Return the signature of a text, which a text with the same answer shares.

    Args:
        text: the text as it was written.
        found: its `words`.
        harmless: words that may differ, as far as the judge agrees; every other word is a name.
    """
    names = _capitalized(text)
    ordered = tuple(
        [word for word in found if word in ORDERED or word in names or (word not in harmless and word not in NEGATIONS)]
    )
    marks = tuple(sorted([word for word in found if word in NEGATIONS]))
    # Where a word tells roles apart (from, than), the order of all other words counts.
    roles = tuple([word for word in found if len(word) > 3]) if not _ROLES.isdisjoint(found) else ()
    return ordered, marks, roles, _asked(found), quoted(text), _scripts(text)


def poles(found: list[str]) -> int:
    """Return the ends of scales that the words are at, two bits per scale."""
    bits = 0
    for word in found:
        bits |= _POLES.get(word, 0)
    return bits


def opposed(first: int, second: int) -> bool:
    """Whether two texts are at opposite ends of a scale, given their `poles`."""
    a, b = first & ~(second & first), second & ~(second & first)
    return bool((a & _ONES) << 1 & b or (b & _ONES) << 1 & a)


def _capitalized(text: str) -> AbstractSet[str]:
    """Return the words that are written with a capital inside of a text that has small letters too."""
    if text.islower() or text.isupper():
        return frozenset()
    inside = _CAPITALIZED.findall(text)
    return frozenset(word for one in inside for word in words(one)) - {"i", "am", "have", "will", "would"}


def _asked(found: list[str]) -> tuple[str, ...]:
    """Return the kinds of answer that are asked for (who, when, how many); `what` and plain `how` ask for anything."""
    asked: list[str] = []
    for word, following in zip(found, [*found[1:], ""], strict=True):
        if kind := _ASKED.get(word):
            asked.append(f"{kind} do" if following in ("do", "doe", "did") and kind == "who" else kind)
        elif word == "how" and following in _MEASURES:
            asked.append(f"how {following}")
    return tuple(asked)


def _scripts(text: str) -> tuple[str, ...]:
    """Return the scripts of a text's letters; () for unaccented Latin letters."""
    if text.isascii():
        return ()
    return tuple(sorted({unicodedata.name(char, "?").partition(" ")[0] for char in text if char.isalpha()}))
