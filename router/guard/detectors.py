"""Places of personal values in a text, by class. Pure, in time that is linear in the text's length.

A text without any costs little: one pass gives its shape, on which each class has a cheap test. Numbers are checked:
cards by the Luhn algorithm (ISO/IEC 7812-1) and their issuers' prefixes, IBANs by country, length and mod 97 (ISO
13616), telephone numbers by Google's metadata (`phonenumbers`, imported with the first candidate).

A national telephone number is found after a word such as "phone" or "Handy", written like (212) 555-0123, or as a
number of one of `regions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final

from .classes import Found, GuardClass
from .keys import find_keys

Expired = Callable[[], bool]
"""A function that returns whether the time for detection is over."""


def find(text: str, regions: Sequence[str] = (), expired: Expired = lambda: False) -> list[Found]:
    """Return the values in a text, in order, without overlaps. `regions` (ISO 3166, `DE`): their national telephone
    numbers are found without a word before them. Raises TimeoutError once `expired`, asked before each costly
    candidate.
    """
    found: list[Found] = []
    for start, end in find_keys(text):
        _check(expired)
        found.append(Found(start, end, "secret"))
    if "@" in text:
        found += _emails(text)
    characters = text.encode("latin-1", "replace")
    if characters.count(b"?") != text.count("?") and _WIDE_DIGIT.search(text) is not None:
        characters = _WIDE_DIGIT.sub("0", text).encode("latin-1", "replace")
    shape = characters.translate(_SHAPES)
    if b"0" in shape:
        found += _numbers(text, shape, regions, expired)
    found += _addresses(text, characters)
    return found if len(found) < 2 else without_overlaps(found)


def without_overlaps(found: Iterable[Found]) -> list[Found]:
    """Return values in the order of the text. Of two that overlap, the one of the stricter class stays."""
    kept: list[Found] = []
    for one in sorted(found, key=lambda each: (each.start, _RANK[each.kind])):
        if not kept or kept[-1].end <= one.start:
            kept.append(one)
        elif _RANK[one.kind] < _RANK[kept[-1].kind]:
            kept[-1] = one
    return kept


_STRICTEST_FIRST: Final[tuple[GuardClass, ...]] = (
    "secret", "email", "iban", "card", "mac", "ip", "phone", "address", "name",
)  # fmt: skip
_RANK: Final = {kind: rank for rank, kind in enumerate(_STRICTEST_FIRST)}


def _shape_of(character: str) -> str:
    if character in "-./()+? ":
        return character
    if character == "\N{NO-BREAK SPACE}":
        return " "
    return "0" if character in "0123456789" else "a" if character.isalpha() or character == "_" else ","


_SHAPES: Final = "".join(map(_shape_of, map(chr, range(256)))).encode()  # of a character in Latin 1
_WIDE_DIGIT: Final = re.compile("[\u0660-\u1fff\ua620-\U0010ffff](?<=\\d)")
_RUN: Final = re.compile(rb"0[-./()+? 0]{6,}")  # `?`: a character beyond Latin 1, such as a narrow space
_LETTER: Final = ord("a")
_HEXADECIMAL: Final = b"0123456789ABCDEFabcdef"
_DATES: Final = frozenset(
    date.replace("-", mark).encode() + hour
    for date in "0000-00-00 0000-00-0 0000-0-00 0000-0-0 00-00-0000 00-0-0000 0-00-0000 0-0-0000".split()
    for mark in "-./"
    for hour in (b"", b" 0", b" 00")
)


def _numbers(text: str, shape: bytes, regions: Sequence[str], expired: Expired) -> Iterator[Found]:
    """Yield the accounts, cards, telephone numbers and addresses (IPv4) of a text."""
    if b"aa00" in shape:
        yield from _ibans(text, shape, expired)
    backwards, size = text[::-1], len(text)
    has_prefix = "+" in text or _ZEROS.search(text) is not None
    may_be_american = _AMERICAN_SHAPE.search(shape) is not None
    has_address = _IP4_SHAPE.search(shape) is not None
    for run in _RUN.finditer(shape):
        numbers = run[0]
        start, end = run.span()
        if has_address and numbers.count(b".") > 2:
            yield from _addresses_4(text, start, end)
        digits = numbers.count(b"0")
        if digits < _FEWEST_OF_PHONE or numbers.rstrip(b" -./()?+") in _DATES:
            continue
        if digits >= _FEWEST_OF_CARD:
            yield from _cards(text, start, end)
        may_begin = start == 0 or shape[start - 1] != _LETTER
        while start and shape[start - 1] in b"+( ":
            start -= 1
        if has_prefix and (text.find("+", start, end) >= 0 or text.find("00", start, end) >= 0):
            yield from _international(text, start, end, expired)
        if regions or may_be_american or (may_begin and _is_introduced(backwards, size - start)):
            yield from _national(text, backwards, start, end, regions, expired)


def _addresses(text: str, characters: bytes) -> Iterator[Found]:
    """Yield the addresses of networks in a text: without hexadecimal digits, their marks stand side by side."""
    marks = characters.translate(None, _HEXADECIMAL)

    def has(run: bytes) -> bool:
        return run in marks and marks.count(run) > characters.count(run)

    if has(b":::::") or has(b"-----"):
        yield from _macs(text)
    if has(b":::::::") or text.count("::") > 4:  # one pass costs less
        yield from _addresses_6(text, 0, len(text))
        return
    at = text.find("::")
    while at >= 0:
        yield from _addresses_6(text, max(0, at - _LONGEST_IP6), at + _LONGEST_IP6)
        at = text.find("::", at + 2)


def _check(expired: Expired) -> None:
    if expired():
        raise TimeoutError("The guard's detectors took too long.")


def _touches(text: str, start: int, end: int, joins: str) -> bool:
    """Return whether a number goes on before or after its place: a letter or digit, or a digit after one of `joins`."""
    if start and (text[start - 1].isalnum() or text[start - 1] == "_"):
        return True
    if start > 1 and text[start - 1] in joins and text[start - 2].isdigit():
        return True
    rest = text[end : end + 2]
    return bool(rest) and (rest[0].isalnum() or rest[0] == "_" or (rest[0] in joins and rest[1:].isdigit()))


# --- mail -------------------------------------------------------------------------------------------------------------

_LOCAL_BACKWARDS: Final = re.compile(r"[\w.+%&'~-]{1,64}")
_DOMAIN: Final = re.compile(
    r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}(?:xn--[A-Za-z0-9-]{1,58}[A-Za-z0-9]|[^\W\d_]{2,24})(?![\w@-])"
)
_FILES: Final = frozenset(  # logo@2x.png
    "avif bmp css csv gif gz html ico jar jpeg jpg js json md mp4 pdf png py rs sh svg tar tgz ts webp xml zip".split()
)


def _emails(text: str) -> Iterator[Found]:
    at = text.find("@")
    while at >= 0:
        local = _LOCAL_BACKWARDS.match(text[max(0, at - 64) : at][::-1])
        domain = None if local is None else _DOMAIN.match(text, at + 1)
        if local is not None and domain is not None:
            start, end = at - len(local[0].rstrip(".'%&-~+")), domain.end()
            is_scp = text[start:at] == "git" and text[end : end + 1] == ":"
            if start < at and not is_scp and domain[0].rpartition(".")[2].lower() not in _FILES:
                yield Found(start, end, "email")
        at = text.find("@", at + 1)


# --- bank accounts and cards ------------------------------------------------------------------------------------------

_SPACES: Final = " \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"
_IBAN_LENGTHS: Final = {
    country: int(length)
    for length, countries in {
        "15": "NO", "16": "BE", "18": "DK FI FO GL NL SD FK", "19": "MK SI", "20": "AT BA EE KZ LT LU XK MN",
        "21": "CH HR LI LV", "22": "BG BH CR DE GB GE IE ME RS VA", "23": "AE IL IQ OM SO TL GI",
        "24": "AD CZ ES MD PK RO SA SE SK TN VG", "25": "LY PT ST", "26": "IS TR", "27": "FR GR IT MC MR SM BI DJ",
        "28": "AL AZ BY CY DO GT HN HU LB PL SV NI", "29": "BR EG PS QA UA", "30": "JO KW MU YE", "31": "MT SC",
        "32": "LC", "33": "RU",
    }.items()
    for country in countries.split()
}  # fmt: skip


def _ibans(text: str, shape: bytes, expired: Expired) -> Iterator[Found]:
    start = shape.find(b"aa00")
    while start >= 0:
        length = _IBAN_LENGTHS.get(text[start : start + 2].upper())
        if length is not None and not (start and (text[start - 1].isalnum() or text[start - 1] == "-")):
            _check(expired)
            end = _end_of_iban(text, start, length)
            if end:
                yield Found(start, end, "iban")
        start = shape.find(b"aa00", start + 1)


def _end_of_iban(text: str, start: int, length: int) -> int:
    """Return where the account number at a place ends; 0: there is none."""
    number, at = "", start
    while at < len(text) and len(number) < length:
        one = text[at]
        if one.isascii() and one.isalnum():
            number += one
        elif len(number) % 4 or (one not in _SPACES and one != "-"):
            break
        at += 1
    is_whole = len(number) == length and not text[at : at + 1].isalnum()
    return at if is_whole and int("".join([str(int(one, 36)) for one in number[4:] + number[:4]])) % 97 == 1 else 0


_CARD: Final = re.compile(
    rf"\d{{4}}(?:([-{_SPACES}]?)\d{{4}}\1\d{{4}}\1\d{{4}}(\1\d{{3}})?|([-{_SPACES}]?)\d{{6}}\3\d{{4,5}})"
)
# First and last prefix of an issuer, and the lengths of its numbers.
_ISSUERS: Final = (
    ("300", "305", (14,)), ("3528", "3589", (16, 19)), ("34", "34", (15,)), ("36", "36", (14,)), ("37", "37", (15,)),
    ("38", "39", (14,)), ("4", "4", (16, 19)), ("51", "55", (16,)), ("2221", "2720", (16,)), ("6011", "6011", (16, 19)),
    ("62", "62", (16, 19)), ("644", "649", (16, 19)), ("65", "65", (16, 19)),
)  # fmt: skip


def _cards(text: str, first: int, last: int) -> Iterator[Found]:
    for match in _CARD.finditer(text, first, last):
        start, end = match.span()
        if _is_card(text, start, end):
            yield Found(start, end, "card")
        elif match[2] and _is_card(text, start, match.start(2)):  # the last three digits are of another number
            yield Found(start, match.start(2), "card")


def _is_card(text: str, start: int, end: int) -> bool:
    if text[start] in "01789" or _touches(text, start, end, ".,-"):  # no issuer's
        return False
    number = "".join([str(int(one)) for one in text[start:end] if one.isdecimal()])
    if not any(low <= number[: len(low)] <= high and len(number) in sizes for low, high, sizes in _ISSUERS):
        return False
    digits = [int(one) for one in reversed(number)]
    return (sum(digits[::2]) + sum(_DOUBLED[one] for one in digits[1::2])) % 10 == 0


_DOUBLED: Final = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)

# --- networks ---------------------------------------------------------------------------------------------------------

_IP4: Final = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_IP6: Final = re.compile(r"(?:[0-9A-Fa-f]{1,4}|:):(?:[0-9A-Fa-f]{0,4}:){0,7}[0-9A-Fa-f]{0,4}")
_IP4_SHAPE: Final = re.compile(rb"0\.0{1,3}\.0{1,3}\.0")
_MAC: Final = re.compile(r"[0-9A-Fa-f]{2}([:-])(?:[0-9A-Fa-f]{2}\1){4}[0-9A-Fa-f]{2}")
_VERSION: Final = re.compile(r"(?i:\b(?:version|release|build|firmware|section|kapitel|chapter|rev)[ :=.]{0,3}|\w/)\Z")
_LONGEST_IP6: Final = 45
_SHORTEST_IP6: Final = 7  # `a::b1` is a name in code


def _addresses_4(text: str, first: int, last: int) -> Iterator[Found]:
    for match in _IP4.finditer(text, first, last):
        start, end = match.span()
        if _touches(text, start, end, ".-") or _VERSION.search(text, max(0, start - 16), start):
            continue
        try:
            address = IPv4Address(match[0])
        except AddressValueError:
            continue
        if not (address.is_loopback or address.is_multicast or match[0].startswith(("0.", "255."))):
            yield Found(start, end, "ip")


def _addresses_6(text: str, first: int, last: int) -> Iterator[Found]:
    for match in _IP6.finditer(text, first, last):
        start, end = match.span()
        value = match[0]
        if ("::" not in value and value.count(":") != 7) or end - start < _SHORTEST_IP6:
            continue
        if value.endswith(":") and not value.endswith("::"):
            value, end = value[:-1], end - 1  # of the sentence
        if _touches(text, start, end, ":.") or not any(one.isdigit() for one in value):
            continue
        try:
            address = IPv6Address(value)
        except AddressValueError:
            continue
        if not (address.is_loopback or address.is_multicast):
            yield Found(start, end, "ip")


def _macs(text: str) -> Iterator[Found]:
    for match in _MAC.finditer(text):
        start, end = match.span()
        value = match[0]
        if _touches(text, start, end, "") or text[end : end + 1] == match[1] or text[start - 1 : start] == match[1]:
            continue
        if len(set(value)) > 2 and (match[1] == ":" or not value.replace("-", "").isdigit()):
            yield Found(start, end, "mac")


# --- telephones -------------------------------------------------------------------------------------------------------

_BETWEEN: Final = rf"[-./(){_SPACES}]"
_INTERNATIONAL: Final = re.compile(rf"(?:\+|00) ?\(?[1-9](?:{_BETWEEN}{{0,3}}\d){{6,14}}")
_ZEROS: Final = re.compile(r"00(?<![\w+.,/-]00)")
_NATIONAL: Final = re.compile(rf"\(?\d(?:{_BETWEEN}{{0,2}}\d){{6,12}}")
_DATE: Final = re.compile(r"(?:\d{1,2}([./-])\d{1,2}\1\d{2,4}|\d{4}([./-])\d{1,2}\2\d{1,2})(?![./-]?\d)")
_AMERICAN: Final = re.compile(r"(?:\([2-9]\d\d\) ?|[2-9]\d\d([.-]))[2-9]\d\d[.-]\d{4}")
_AMERICAN_SHAPE: Final = re.compile(rb"000(?:[-.]|\) ?)000[-.]0000")
_BEFORE: Final = re.compile(r"(?:[^\w\n]|_)*+([^\W\d_]++)")
_CALL: Final = frozenset(
    "tel tél telemovel telemóvel movil móvil cell cellulare celular portable fax sms whatsapp dial reach joindre ligue"
    " liga ligar".split()
)
_CALL_STEMS: Final = tuple(
    "telefon telefón teléfon teléfón téléphone phone mobil handy call ruf anruf erreich appel rappel llam llám chiam"
    " richiam contact kontakt".split()
)
_STARTS: Final = frozenset(stem[:3] for stem in _CALL_STEMS)  # one look-up, where `startswith` compares each
_NUMBER: Final = frozenset("number nummer número numéro numero".split())
_OWN: Final = frozenset("my new his her our their der die meine neue mi mon mio meu nuevo nouveau nuovo novo".split())
_THEM: Final = frozenset("me us him her them".split())
_SHORT: Final = 4  # letters of a word that may stand between: "call me at", "rufen Sie mich an: "
_NEAR: Final = 48  # characters before a number that may tell that it is a telephone's
_FEWEST_OF_PHONE: Final = 7
_FEWEST_OF_CARD: Final = 14
_FEWEST_DIGITS: Final = 9  # of a national number that neither a word nor a leading zero introduces


def _international(text: str, first: int, last: int, expired: Expired) -> Iterator[Found]:
    for match in _INTERNATIONAL.finditer(text, first, last):
        start = match.start()
        if start and (text[start - 1].isalnum() or text[start - 1] in "+.,_-/"):
            continue
        if end := _valid_until(match[0], None, expired):
            yield Found(start, start + end, "phone")


def _national(
    text: str, backwards: str, first: int, last: int, regions: Sequence[str], expired: Expired
) -> Iterator[Found]:
    for match in _NATIONAL.finditer(text, first, last):
        start, end = match.span()
        if _touches(text, start, end, "-.,/:") or text[start - 1 : start] == "+" or _DATE.match(text, start):
            continue
        if _is_introduced(backwards, len(text) - start):
            yield Found(start, end, "phone")
            continue
        if _AMERICAN.fullmatch(match[0]) and _valid_until(match[0], "US", expired):
            yield Found(start, end, "phone")
            continue
        starts = match[0].lstrip("(").startswith("0") or match[0].startswith("(")
        if regions and (starts or sum(one.isdigit() for one in match[0]) >= _FEWEST_DIGITS):
            ends = (_valid_until(match[0], region, expired) for region in regions)
            if length := next(filter(None, ends), 0):
                yield Found(start, start + length, "phone")


def _is_introduced(backwards: str, at: int) -> bool:
    """Return whether the text before a number says that it is a telephone's. `backwards`: the text reversed."""
    later, end = "", at + _NEAR
    while (match := _BEFORE.match(backwards, at, end)) is not None:
        word = match[1][::-1].lower()
        if later in _NUMBER and word in _OWN:
            return True
        if word in _CALL or (word == "text" and later in _THEM):
            return True
        if word[:3] in _STARTS and word.startswith(_CALL_STEMS):
            return True
        if len(word) > _SHORT and word not in _NUMBER and word != "unter":
            return False
        later, at = word, match.end()
    return False


def _valid_until(candidate: str, region: str | None, expired: Expired) -> int:
    """Return the length of the valid number at the start of a candidate, which other numbers may follow; 0: none."""
    import phonenumbers  # takes a while, and most processes never see a candidate

    _check(expired)
    for _ in range(3):
        number = "+" + candidate[2:] if region is None and candidate.startswith("00") else candidate
        try:
            if phonenumbers.is_valid_number(phonenumbers.parse(number, region)):
                return len(candidate)
        except phonenumbers.NumberParseException:
            pass
        candidate = candidate.rpartition(" ")[0].rstrip(" -./(")
        if not candidate:
            break
    return 0
