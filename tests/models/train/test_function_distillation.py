"""Hints of a tutor: what it starts from, what it learns, which texts are made, and what a network takes from it."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.models.train.requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402

from models.catalog.artifact import ArtifactError  # noqa: E402
from models.function_calls.call import FunctionCall  # noqa: E402
from models.function_calls.dataset import Row  # noqa: E402
from models.signals.encoder import SentenceEncoder  # noqa: E402
from models.train.assistant.mixture import HINTED, Corpus, Example, FunctionHint, Mixture  # noqa: E402
from models.train.assistant.trainer import Trainer, TrainingPlan, answer_logits  # noqa: E402
from models.train.auxiliary_losses.bert import load_bert, same_lengths  # noqa: E402
from models.train.auxiliary_losses.embedding_loss import UNKNOWN, keep  # noqa: E402
from models.train.auxiliary_losses.function_distillation import (  # noqa: E402
    HINTS,
    TUTOR,
    FunctionHints,
    ask,
    lessons,
    near_words,
    with_hints,
)
from models.train.auxiliary_losses.function_teacher import (  # noqa: E402
    FunctionTeacher,
    TeacherSchedule,
    answering,
    find_teacher,
    share_right,
)
from models.train.data.paraphrase import Paraphraser, common_words, whole_words  # noqa: E402
from models.train.network.llama import Llama, LlamaConfig  # noqa: E402
from models.train.network.tokenizer import AssistantTokenizer  # noqa: E402
from models.train.signals.bert_to_onnx import convert  # noqa: E402
from tests.models.signals.test_encoder import PIECES, TEXTS, save, weights  # noqa: E402

NAMES = ["alarm_query", "alarm_remove", "alarm_set", "lights_on"]
ROWS = [
    *(Row(text, "lights_on", source="hwu64") for text in TEXTS if text.startswith("turn")),
    *(Row(text, "alarm", source="clinc150") for text in TEXTS if text.startswith("wake")),
]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save(folder, weights())
    return folder


@pytest.fixture(scope="module")
def tutor(published: Path, tmp_path_factory: pytest.TempPathFactory) -> FunctionTeacher:
    torch.set_num_threads(1)
    kept = tmp_path_factory.mktemp("tutor") / TUTOR
    course = TeacherSchedule(epochs=16, tokens=64, body_lr=3e-3, head_lr=2e-2)
    return find_teacher(published, ROWS * 2, NAMES, kept, seed=1, say=lambda _: None, course=course)


def test_the_tutor_starts_where_the_published_encoder_ended(published: Path, tmp_path: Path) -> None:
    """Its vectors point where those of the ONNX graph of the same files point; other files are refused."""
    convert(published, tmp_path / "bert.onnx")
    bert, reading = load_bert(published)
    encoder = SentenceEncoder(tmp_path / "bert.onnx")
    for text in TEXTS[:4]:
        with torch.no_grad():
            vector = bert.eval()(torch.tensor([reading(text)]))[0]
        assert float(vector @ torch.tensor(encoder(text)) / vector.norm()) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ArtifactError, match="no BERT"):
        load_bert(tmp_path)


def test_a_batch_has_texts_of_one_length() -> None:
    """Every text comes once, and none is padded."""
    ids = [[1] * (3 + index % 4) for index in range(50)]
    groups = list(same_lengths(ids, 12, random.Random(1)))
    assert sorted(index for group in groups for index in group) == list(range(50))
    assert all(len({len(ids[index]) for index in group}) == 1 for group in groups)
    assert max(len(group) * len(ids[group[0]]) for group in groups) <= 12


def test_a_tutor_learns_what_texts_ask_for_and_is_kept(tutor: FunctionTeacher, published: Path, tmp_path: Path) -> None:
    """A row that three functions answer teaches that it is one of them; a tutor on disk is not taught again."""
    shares = tutor.tell([row.text for row in ROWS])
    assert shares.sum(-1).tolist() == pytest.approx([1.0] * len(ROWS), abs=1e-4)
    assert share_right(tutor, ROWS) == 1.0
    assert float((shares * answering(ROWS, NAMES)).sum(-1).mean()) > 0.5
    torch.save(tutor.state_dict(), tmp_path / TUTOR)
    again = find_teacher(published, [], NAMES, tmp_path / TUTOR, seed=2, say=lambda _: None)
    assert torch.equal(again.tell([TEXTS[0]]), tutor.tell([TEXTS[0]]))


def test_only_what_the_tutor_is_sure_of_becomes_a_hint(tutor: FunctionTeacher) -> None:
    """The best function comes first, and the probabilities that are kept sum to one."""
    told, vectors = ask(tutor, TEXTS, lambda _: None)
    assert torch.from_numpy(vectors).float().numpy() == pytest.approx(tutor.vectors(TEXTS).numpy(), abs=0.05)
    assert {text for text, _ in told} <= set(TEXTS)
    for _, shares in told:
        assert sum(share for _, share in shares) == pytest.approx(1.0)
        assert shares[0][1] == max(share for _, share in shares) >= 0.4
    assert [shares[0][0] for text, shares in told if text.startswith("turn")] == ["lights_on"] * 12


def test_texts_are_made_of_known_words_and_their_neighbours(tutor: FunctionTeacher) -> None:
    """Changed texts differ from their row's, and hold no word that neither a row nor a neighbour has."""
    near = near_words(tutor, common_words(ROWS, least=2))
    assert all(word not in others for word, others in near.items())
    paraphrase = Paraphraser(ROWS, near, seed=3)
    made = [paraphrase(row) for row in ROWS for _ in range(6)]
    assert len(set(made) - {row.text for row in ROWS}) > 20
    assert {word for text in made for word in text.split()} <= {word for row in ROWS for word in row.text.split()}
    assert all(made)


def test_words_that_nobody_said_come_in_too(tutor: FunctionTeacher) -> None:
    """A tokenizer's whole words are neighbours as well, beside those of the rows, and no word is its own."""
    words = common_words(ROWS, least=2)
    unsaid = whole_words(tutor.reading.pieces.listed)
    assert unsaid
    assert all(len(word) > 2 and word.isalpha() for word in unsaid)
    narrow, wide = near_words(tutor, words), near_words(tutor, words, unsaid)
    assert all(wide[word][: len(narrow[word])] == narrow[word] for word in words)
    assert all(word not in others for word, others in wide.items())
    assert {one for others in wide.values() for one in others} - set(words)
    assert near_words(tutor, [], unsaid) == {}


def test_a_text_goes_on_as_another_does_after_the_same_word() -> None:
    """Two of one source that share a word are crossed at it, now and then; those of another source are not."""
    here, there = (
        Row("wake me at six tomorrow", "alarm", source="a"),
        Row("remind me of the cake", "remind", source="a"),
    )
    elsewhere = Row("sing me a song", "music", source="b")
    paraphrase = Paraphraser([here, there, elsewhere], {}, seed=1)
    made = {paraphrase(here) for _ in range(400)}
    assert "wake me of the cake" in made
    assert not any("song" in text for text in made)


def test_the_tutor_is_taught_a_part_of_what_is_easy_and_more_of_what_is_rare() -> None:
    """Of SNIPS' rows about a third, of the others all, and those out of scope four times; the same for a seed."""
    easy = [Row(f"play {number}", "PlayMusic", source="snips2017") for number in range(300)]
    rare = [Row("who am i", "oos", source="clinc150")]
    chosen = lessons([*ROWS, *easy, *rare], seed=5)
    assert [row for row in chosen if row in ROWS] == ROWS
    assert chosen.count(rare[0]) == 4
    assert 70 < len([row for row in chosen if row in easy]) < 130
    assert chosen == lessons([*ROWS, *easy, *rare], seed=5)


def test_a_hint_stands_in_for_the_right_name() -> None:
    """The loss there is the cross entropy with the probabilities; every other loss stays."""
    logits = torch.randn(3, 8, generator=torch.manual_seed(1))
    losses = torch.tensor([1.0, 2.0, 3.0])
    changed = with_hints(losses, logits, [(1, [(4, 0.75), (6, 0.25)])])
    told = logits.log_softmax(-1)[1]
    assert changed.tolist() == pytest.approx([1.0, -float(0.75 * told[4] + 0.25 * told[6]), 3.0])
    assert with_hints(losses, logits, []) is losses


def test_a_network_comes_to_think_as_probable_what_the_tutor_does(tmp_path: Path) -> None:
    """Sixty steps on one hinted text: two names at two thirds and one third, although the target names the first."""
    example = Example([1, 5, 2], [7, 9], HINTED, hints=[FunctionHint(1, [(9, 2 / 3), (11, 1 / 3)])])
    network = Llama(LlamaConfig(vocabulary=64, width=64, layers=2, heads=1, hidden=96))
    plan = TrainingPlan(minutes=5, steps=60, threads=1, warmup_steps=2, dropout=0.0, vector_lr=1e-2)
    Trainer(network, plan, tmp_path).run(lambda: [example], lambda *_: None)
    with torch.no_grad():
        odds = answer_logits(network, [example])[0][1].softmax(-1)
    assert float(odds[9]) == pytest.approx(2 / 3, abs=0.1)
    assert float(odds[11]) == pytest.approx(1 / 3, abs=0.1)


def test_an_epoch_draws_from_the_hints_of_the_run(tmp_path: Path) -> None:
    """As many as asked for, and of the rows the share that is asked for; hints that lie in the run's folder need no
    tutor.
    """
    told = [(text, [("alarm_set", 0.6), ("lights_on", 0.4)]) for text in TEXTS]
    (tmp_path / HINTS).write_bytes(msgspec.json.encode(told))
    keep(TEXTS[:1], np.ones((1, 4)), tmp_path)
    hints = FunctionHints.of(tmp_path / "missing", [], NAMES, tmp_path, seed=1, say=lambda _: None)
    vocabulary = AssistantTokenizer.train([*TEXTS, *PIECES], [*NAMES, "out_of_scope"], ["time"], 60)
    rows = tuple(row for row in ROWS if row.source == "hwu64")
    assert hints.meanings is not None
    assert hints.meanings.at(TEXTS[0]) == 0
    mixture = Mixture(Corpus(rows, (), (), ()), vocabulary, student=False, seed=1, hints=hints, hinted=5)
    drawn = [one for one in mixture.epoch() if one.source == HINTED]
    assert len(drawn) == 5
    assert all(len(one.target) == 2 for one in drawn)
    found = {vocabulary.decode([token]) for one in drawn for hint in one.hints for token, _ in hint.shares}
    assert found == {'"alarm_set"', '"lights_on"'}
    few = Mixture(Corpus(rows, (), (), ()), vocabulary, student=False, seed=1, share=0.25).epoch()
    assert len([one for one in few if one.source == "hwu64"]) == len(rows) / 4
    assert not [one for one in Mixture(Corpus(rows, (), (), ()), vocabulary, False, 1).epoch() if one.hints]


def test_a_tutor_says_what_rows_mean_and_what_their_variants_ask_for(
    tutor: FunctionTeacher, published: Path, tmp_path: Path
) -> None:
    """Every text has the tutor's vector; of a row whose function is known nothing else is said."""
    torch.save(tutor.state_dict(), tmp_path / TUTOR)
    hints = FunctionHints.of(published, ROWS, NAMES, tmp_path, seed=1, say=lambda _: None)
    assert hints.meanings is not None
    assert UNKNOWN not in [hints.meanings.at(text) for text in (*(row.text for row in ROWS), *dict(hints.told))]
    assert not {text for text, _ in hints.told} & {row.text for row in ROWS if row.source == "hwu64"}
    place = hints.meanings.at(ROWS[0].text)
    (wanted,) = torch.nn.functional.normalize(tutor.vectors([ROWS[0].text]), dim=-1)
    assert float(hints.meanings.vectors[place] @ wanted) > 0.99


def test_the_device_hears_what_is_its_own_and_what_is_not() -> None:
    """How probable each of its own functions is, as a whole again, and all others together as a refusal. What is too
    close to its own functions to be refused says nothing.
    """
    told = FunctionHints(
        [
            ("wake me at six", [("alarm_set", 0.6), ("bank_top_up", 0.2), ("alarm_query", 0.2)]),
            ("top up my card", [("bank_top_up", 0.9), ("alarm_set", 0.1)]),
            ("ten minutes from now", [("timer", 0.7), ("alarm_set", 0.3)]),
        ]
    )
    names = ["alarm_set", "alarm_query", "bank_top_up", "timer", "out_of_scope"]
    vocabulary = AssistantTokenizer.train([*TEXTS, *PIECES], names, ["time"], 60)
    rows = tuple(row for row in ROWS if row.source == "hwu64")
    epoch = Mixture(Corpus(rows, (), (), ()), vocabulary, True, 1, hints=told, hinted=6).epoch()
    heard = {len(one.target): one for one in epoch if one.source == HINTED}
    assert sorted(heard) == [1, 2]
    opening = vocabulary.call(FunctionCall("alarm_set"))[0]
    own, other = heard[2].hints, heard[1].hints
    assert [hint.place for hint in own] == [0, 1]
    assert dict(own[0].shares) == {opening: pytest.approx(0.8), vocabulary.refuse: pytest.approx(0.2)}
    assert {vocabulary.decode([token]): share for token, share in own[1].shares} == {
        '"alarm_set"': pytest.approx(0.75),
        '"alarm_query"': pytest.approx(0.25),
    }
    assert heard[1].target == [vocabulary.refuse]
    assert [dict(hint.shares) for hint in other] == [
        {opening: pytest.approx(0.1), vocabulary.refuse: pytest.approx(0.9)}
    ]
