"""Invented values: new, in the likeness of the slot's own, and only where the slot brings new ones."""

from __future__ import annotations

from models.train.data.invented_values import ValueInventor, alike

TITLES = ["The Ghost of Tomorrow", "A Song for Winter", "Lord of the Hills", "Night Train", "Blue"]
VALUES = {
    ("snips2017", "object_name"): TITLES,
    ("snips2017", "rating_value"): ["5"] * 20,
    ("snips2017", "timeRange"): ["in seven minutes", "5:30 am", "March the 3rd"],
    ("hwu64", "song_name"): ["yellow river"],
}


def names(seed: int = 1) -> ValueInventor:
    return ValueInventor(VALUES, ["garden", "Piano", "walked", "seventeen", "42"], seed)


def test_novelty_is_the_share_of_values_that_occur_once() -> None:
    """Titles are always new, ratings never, and a slot that nobody has seen brings nothing."""
    assert names().novelty("snips2017", "object_name") == 1.0
    assert names().novelty("snips2017", "rating_value") == 0.0
    assert names().novelty("snips2017", "nothing") == 0.0


def test_titles_are_new_and_look_like_titles() -> None:
    """Nearly all differ from the rows' own, start with a capital as those do, and none is empty."""
    draw = names()
    made = [draw.invented("snips2017", "object_name", "Blue") for _ in range(200)]
    assert sum(name not in TITLES for name in made) > 180
    assert len(set(made)) > 150
    assert all(name and name == name.strip() and name[0].isupper() for name in made)
    assert all(name == name.lower() for name in (draw.invented("hwu64", "song_name", "x") for _ in range(50)))


def test_times_change_their_numbers_and_nothing_else() -> None:
    """Digits, counted words, days and months are drawn anew; the words around them stay."""
    draw = names()
    made = {draw.invented("snips2017", "timeRange", "in seven minutes on March 3rd") for _ in range(50)}
    assert len(made) > 20
    assert all(text.startswith("in ") and " minutes on " in text and text.endswith("rd") for text in made)
    assert draw.invented("snips2017", "timeRange", "tonight") == "tonight"


def test_the_same_seed_invents_the_same() -> None:
    """Invention is reproducible."""
    one, other = names(4), names(4)
    assert [one.invented("snips2017", "object_name", "x") for _ in range(20)] == [
        other.invented("snips2017", "object_name", "x") for _ in range(20)
    ]


def test_words_that_begin_alike_are_found_together() -> None:
    """What a tokenizer cuts into the same first piece, whatever its case."""
    assert alike(["Cup", "cut", "tea"]) == {"cu": ["Cup", "cut"], "te": ["tea"]}
