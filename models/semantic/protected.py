"""Splitting of text into comparable words, and protected words that two questions must share before similarity counts.

Words are in lower case, contractions spelled out, number words as digits, plurals without their s. Numbers, units,
names, negation, quotes and so on are protected: `signature` collects them, and two texts with different signatures
never share an answer. A word that is not known to be harmless counts as a name, so an unknown word always separates two
texts. `poles` finds opposites: two texts conflict if one has a word at one end of a scale (up, increase, louder) and
the other a word at the opposite end (down, lower).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Set as AbstractSet

import msgspec

from causeway_server.router.documents.data import table_of

CHARACTERS = 400  # a longer text is no short question: it never matches another one
_TOKEN = re.compile(r"[^\W_]+(?:[.,:'/@&_-]+[^\W_]+)*|[^\w\s]|_")
_QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”|«([^»]+)»|`([^`]+)`|(?<!\w)'([^']+)'(?!\w)|(?<!\w)‘([^’]+)’")
_QUOTES = frozenset("\"“«`'‘’´")  # one of them is in each quoted part
_CLOCK = re.compile(r"\b(\d{1,2})(?::(\d\d))?\s*([ap])\.?\s?m\b\.?")
_POLITE_START = re.compile(
    r"^(?:(?:please|kindly|hey|ok|okay|hi|hello)[\s,]+(?=\w)|(?:could|would|will|can) you please |could you (?=\w)|"
    r"(?:can|would|will) you (?=(?:tell|show|give|remind|let|find) me |set |add |turn |send )|"
    r"i (?:want|need|would like) you to |i'd like you to )+"
)
_POLITE_END = re.compile(r"(?<=\w)[\s,.]+(?:please|thanks|thank you)[\s.!?]*$")
# A question about words themselves: its `please` may be one of those words.
_ABOUT_WORDS = re.compile(
    r"\b(?:say|said|saying|word|translat\w*|spell\w*|mean\w*|defin\w*|call\w*|write|type|text|message|email|song|sing|"
    r"play|rhyme\w*|search|google|lyrics|named?|title|reply|answer)\b"
)
_HALVES = ("am", "pm")  # of a day, after a number
_SYMBOLS = str.maketrans({"’": "'", "‘": "'", "´": "'", "−": "-", "–": "-", "…": " "})

_CONTRACTIONS = {
    "won't": "will not", "can't": "can not", "cannot": "can not", "shan't": "shall not", "ain't": "is not",
    "let's": "let us", "gonna": "going to", "wanna": "want to", "gimme": "give me", "gotta": "have to",
    "whats": "what is", "hows": "how is", "wheres": "where is", "whos": "who is", "whens": "when is",
    "im": "i am", "ive": "i have", "dont": "do not", "doesnt": "does not", "didnt": "did not", "isnt": "is not",
    "arent": "are not", "wasnt": "was not", "werent": "were not", "havent": "have not", "hasnt": "has not",
    "wouldnt": "would not", "couldnt": "could not", "shouldnt": "should not", "wont": "will not", "cant": "can not",
    "ok": "okay", "pls": "please", "plz": "please", "thx": "thanks", "u": "you", "r": "are",
}  # fmt: skip
_ENDINGS = (("n't", "not"), ("'re", "are"), ("'ve", "have"), ("'ll", "will"), ("'m", "am"), ("'d", "would"))
_IS = frozenset("what how where who when why that it there here he she".split())  # whose 's is "is"

_UNITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
_UNITS += "seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINALS = "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
_ORDINALS += "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth"
NUMBERS: dict[str, str] = {word: str(value) for value, word in enumerate(_UNITS.split())}
NUMBERS |= {word: str(10 * value) for value, word in enumerate(_TENS.split(), 2)}
NUMBERS |= {word: f"{value}th" for value, word in enumerate(_ORDINALS.split())}
NUMBERS |= {"1st": "1th", "2nd": "2th", "3rd": "3th"}

# Endings after which an s is no plural.
_NO_PLURAL = ("ss", "us", "is", "os")


class _Words(msgspec.Struct, frozen=True):
    """`words.yaml`: words separated by spaces; a scale has one end and the other."""

    negations: str
    ordered: str
    scales: tuple[tuple[str, str], ...]


_WORDS = table_of(__package__, "words.yaml", _Words)
_ASKED = {"who": "who", "whom": "who", "whose": "who", "when": "when", "where": "where", "why": "why", "which": ""}
_MEASURES = frozenset("many much old long far tall big often fast high heavy deep large soon late expensive".split())
_CAPITALIZED = re.compile(r"(?<=[\w,;] )[A-Z][\w'-]*")
_ROLES = frozenset("from than versus vs between".split())
_POLES: dict[str, int] = {}  # per word: two bits per scale
Signature = tuple[object, ...]


def quoted(text: str) -> tuple[str, ...]:
    """Return the quoted parts of a text, as they are written."""
    if _QUOTES.isdisjoint(text):
        return ()
    return tuple(next(filter(None, match)) for match in _QUOTED.findall(text.translate(_SYMBOLS) + " "))


def words(text: str) -> list[str]:
    """Split a text into comparable words and symbols. Sentence punctuation and politeness are left out."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text).translate(_SYMBOLS)
    lowered = plain.lower()
    lowered = _CLOCK.sub(r"\1:\2 \3m", lowered).replace(": ", " ") if "m" in lowered else lowered
    lowered = _without_politeness(lowered.strip())
    found: list[str] = []
    for token in _TOKEN.findall(lowered):
        if token in ".,!?;:\"'`()[]{}“”«»":
            continue
        for word in _spelled_out(token):
            if word in _HALVES and found and found[-1][0].isdigit():
                found[-1] += word
            else:
                found.append(NUMBERS.get(word) or stem(word))
    return found


def _without_politeness(lowered: str) -> str:
    if "please" not in lowered and "thank" not in lowered and not _POLITE_START.match(lowered):
        return lowered
    if not _ABOUT_WORDS.search(lowered):
        lowered = _POLITE_END.sub("", lowered)
        return _POLITE_START.sub("", lowered)
    return _POLITE_START.sub("", lowered, count=1) if lowered.startswith(("please ", "could ", "can ")) else lowered


def stem(word: str) -> str:
    """Return a word without its plural s; words of up to three letters are unchanged."""
    if len(word) <= 3 or not word.endswith("s") or word.endswith(_NO_PLURAL) or not word.isalpha():
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    return word[:-1]


def _spelled_out(token: str) -> list[str]:
    whole = _CONTRACTIONS.get(token)
    if whole is not None:
        return whole.split()
    if "'" in token:
        for ending, word in _ENDINGS:
            if token.endswith(ending) and len(token) > len(ending):
                return [token[: -len(ending)], word]
        if token.endswith("'s"):
            return [token[:-2], "is"] if token[:-2] in _IS else [token[:-2]]
    if "-" in token and token.replace("-", "").isalpha():
        return token.split("-")
    return [token]


def _found(listed: str) -> frozenset[str]:
    """Return listed words in the form in which `words` finds them in a text."""
    return frozenset(word for one in listed.split() for word in words(one))


NEGATIONS, ORDERED = _found(_WORDS.negations), _found(_WORDS.ordered)
SCALES = tuple((_found(one), _found(other)) for one, other in _WORDS.scales)
for _number, (_one, _other) in enumerate(SCALES):
    for _end, _words in ((1, _one), (2, _other)):
        for _word in _words:
            _POLES[_word] = _POLES.get(_word, 0) | _end << 2 * _number
_ONES = sum(1 << 2 * number for number in range(len(SCALES)))


def signature(text: str, found: list[str], harmless: AbstractSet[str]) -> Signature:
    """Return a text's protected words, equal for texts with the same answer. Other words than `harmless` are names."""
    names = _capitalized(text)
    ordered = tuple(
        [word for word in found if word in ORDERED or word in names or (word not in harmless and word not in NEGATIONS)]
    )
    marks = tuple(sorted([word for word in found if word in NEGATIONS]))
    # Where a word tells roles apart (from, than), the order of all other words counts.
    roles = tuple([word for word in found if len(word) > 3]) if not _ROLES.isdisjoint(found) else ()
    return ordered, marks, roles, _asked(found), quoted(text), _scripts(text)


def poles(found: list[str]) -> int:
    """Return the ends of scales that the words belong to, two bits per scale."""
    bits = 0
    for word in found:
        bits |= _POLES.get(word, 0)
    return bits


def opposed(first: int, second: int) -> bool:
    """Return whether two texts have words at opposite ends of a scale, given their `poles`."""
    a, b = first & ~(second & first), second & ~(second & first)
    return bool((a & _ONES) << 1 & b or (b & _ONES) << 1 & a)


def _capitalized(text: str) -> AbstractSet[str]:
    """Return the words with a capital letter inside a text that has small letters too."""
    if text.islower() or text.isupper():
        return frozenset()
    inside = _CAPITALIZED.findall(text)
    return frozenset(word for one in inside for word in words(one)) - {"i", "am", "have", "will", "would"}


def _asked(found: list[str]) -> tuple[str, ...]:
    """Return the kinds of answer that a question wants (who, when, how many); `what` and plain `how`: any."""
    kinds: list[str] = []
    for word, following in zip(found, [*found[1:], ""], strict=True):
        if kind := _ASKED.get(word):
            kinds.append(f"{kind} do" if following in ("do", "doe", "did") and kind == "who" else kind)
        elif word == "how" and following in _MEASURES:
            kinds.append(f"how {following}")
    return tuple(kinds)


def _scripts(text: str) -> tuple[str, ...]:
    """Return the scripts of a text's letters; () for unaccented Latin letters."""
    if text.isascii():
        return ()
    return tuple(sorted({unicodedata.name(char, "?").partition(" ")[0] for char in text if char.isalpha()}))
