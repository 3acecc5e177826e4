"""Invented slot values: new, similar to the slot's values, and only in slots that bring new ones."""

from __future__ import annotations

from causeway_train.data.invented_values import ValueInventor, group_by_prefix

TITLES = ["The Ghost of Tomorrow", "A Song for Winter", "Lord of the Hills", "Night Train", "Blue"]
VALUES = {
    ("snips2017", "object_name"): TITLES,
    ("snips2017", "rating_value"): ["5"] * 20,
    ("snips2017", "timeRange"): ["in seven minutes", "5:30 am", "March the 3rd"],
    ("hwu64", "song_name"): ["yellow river"],
}


def inventor(seed: int = 1) -> ValueInventor:
    return ValueInventor(VALUES, ["garden", "Piano", "walked", "seventeen", "42"], seed)


def test_novelty_is_the_share_of_values_that_occur_once() -> None:
    assert inventor().novelty("snips2017", "object_name") == 1.0
    assert inventor().novelty("snips2017", "rating_value") == 0.0
    assert inventor().novelty("snips2017", "nothing") == 0.0


def test_invented_titles_are_new_and_look_like_titles() -> None:
    invent = inventor().invent
    made = [invent("snips2017", "object_name", "Blue") for _ in range(200)]
    assert sum(name not in TITLES for name in made) > 180
    assert len(set(made)) > 150
    assert all(name and name == name.strip() and name[0].isupper() for name in made)
    assert all(name == name.lower() for name in (invent("hwu64", "song_name", "x") for _ in range(50)))


def test_times_change_their_numbers_and_nothing_else() -> None:
    invent = inventor().invent
    made = {invent("snips2017", "timeRange", "in seven minutes on March 3rd") for _ in range(50)}
    assert len(made) > 20
    assert all(text.startswith("in ") and " minutes on " in text and text.endswith("rd") for text in made)
    assert invent("snips2017", "timeRange", "tonight") == "tonight"


def test_the_same_seed_invents_the_same_values() -> None:
    one, other = inventor(4), inventor(4)
    assert [one.invent("snips2017", "object_name", "x") for _ in range(20)] == [
        other.invent("snips2017", "object_name", "x") for _ in range(20)
    ]


def test_words_are_grouped_by_prefix() -> None:
    assert group_by_prefix(["Cup", "cut", "tea"]) == {"cu": ["Cup", "cut"], "te": ["tea"]}
