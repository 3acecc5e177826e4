"""The words that people say to the assistant choose among transcripts."""

from __future__ import annotations

import math

from causeway_server.models.catalog.artifact import find_signal, verify_artifact
from causeway_server.models.parts.encoders.words import WordModel
from causeway_train.signals.spoken import count_words

TEXTS = [
    "turn off the lights",
    "turn off the lights please",
    "turn the lights on",
    "Play some music.",
    "play some jazz",
]


def test_a_transcript_with_known_words_wins_if_the_speech_model_hardly_prefers_another() -> None:
    model = WordModel(count_words(TEXTS, "en"))
    assert model.language == "en"
    assert model.best([("Turn of the lice.", -2.0), ("Turn off the lights.", -2.5)])[0] == 1
    assert model.best([("Turn of the lice.", -2.0), ("Turn off the lights.", -40.0)])[0] == 0
    assert model.best([("x", -1.0), ("X.", -1.0)]) == (0, 1.0)
    assert model.best([("", -1.0)]) == (0, 1.0)


def test_the_confidence_is_the_share_among_transcripts_that_differ_in_words() -> None:
    model = WordModel(count_words(TEXTS, "en"))
    one, other = ("Play some jazz.", -1.0), ("Play some jam.", -1.0)
    best, alone = model.best([one, other])
    assert best == 0
    assert 0.5 < alone < 1.0
    assert model.best([one, ("play some jazz", -3.0), other]) == (0, alone)
    assert model.best([other, other, one]) == (2, alone)


def test_numbers_are_chosen_as_words() -> None:
    model = WordModel(count_words(["set an alarm for seven am"] * 9, "en"))
    assert model.best([("Set a larm for 7am.", -1.0), ("Set an alarm for 7 a.m.", -4.0)])[0] == 1


def test_a_text_of_unknown_words_is_improbable_not_impossible() -> None:
    model = WordModel(count_words(TEXTS, "en"))
    known, unknown = model.log_probability(["turn", "off", "the", "lights"]), model.log_probability(["zyx", "wvu"])
    assert -math.inf < unknown < known < 0.0


def test_rare_sequences_are_not_kept() -> None:
    counts = count_words(TEXTS, "en")
    assert counts.unigrams["jazz"] == 1
    assert "some jazz" not in counts.bigrams
    assert counts.bigrams["play some"] == 2


def test_the_shipped_counts_are_whole_and_know_commands() -> None:
    artifact = find_signal("heard-words")
    verify_artifact(artifact)
    model = WordModel.read(artifact.path)
    assert model.language == "en"
    assert (
        model.best([("Turn off the lives in the bad room.", -4.0), ("Turn off the lights in the bedroom.", -5.0)])[0]
        == 1
    )
