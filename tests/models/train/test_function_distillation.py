"""Function distillation: the teacher, the texts it labels, and what a network learns from the soft labels."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from .requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402

from causeway_server.models.catalog.artifact import ArtifactError  # noqa: E402
from causeway_server.models.signals.encoder import SentenceEncoder  # noqa: E402
from causeway_train.assistant.batches import answer_logits  # noqa: E402
from causeway_train.assistant.mixture import SOFT_LABELLED, Corpus, Example, Mixture, SoftTarget  # noqa: E402
from causeway_train.assistant.trainer import Trainer, TrainingPlan  # noqa: E402
from causeway_train.auxiliary_losses.bert import batches_by_length, load_bert  # noqa: E402
from causeway_train.auxiliary_losses.embedding_loss import NO_EMBEDDING, save_embeddings  # noqa: E402
from causeway_train.auxiliary_losses.function_distillation import (  # noqa: E402
    SOFT_LABELS,
    TEACHER,
    FunctionSoftLabels,
    label_texts,
    nearest_words,
    soften,
    teacher_rows,
)
from causeway_train.auxiliary_losses.function_teacher import (  # noqa: E402
    FunctionTeacher,
    TeacherSchedule,
    accuracy,
    answer_mask,
    load_or_train_teacher,
)
from causeway_train.data.paraphrase import Paraphraser, common_words, whole_words  # noqa: E402
from causeway_train.function_calls.call import FunctionCall  # noqa: E402
from causeway_train.function_calls.dataset import Row  # noqa: E402
from causeway_train.network.llama import Llama, LlamaConfig  # noqa: E402
from causeway_train.network.tokenizer import AssistantTokenizer  # noqa: E402
from causeway_train.signals.bert_to_onnx import convert  # noqa: E402
from tests.models.signals.test_encoder import PIECES, TEXTS, save, weights  # noqa: E402

pytestmark = pytest.mark.slow

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
def teacher(published: Path, tmp_path_factory: pytest.TempPathFactory) -> FunctionTeacher:
    torch.set_num_threads(1)
    checkpoint = tmp_path_factory.mktemp("teacher") / TEACHER
    schedule = TeacherSchedule(epochs=16, tokens=64, body_lr=3e-3, head_lr=2e-2)
    return load_or_train_teacher(
        published, ROWS * 2, NAMES, checkpoint, seed=1, progress=lambda _: None, schedule=schedule
    )


def test_the_torch_encoder_agrees_with_the_onnx_graph(published: Path, tmp_path: Path) -> None:
    """Both are made of the same published files; other files are refused."""
    convert(published, tmp_path / "bert.onnx")
    bert, bert_tokenizer = load_bert(published)
    encoder = SentenceEncoder(tmp_path / "bert.onnx")
    for text in TEXTS[:4]:
        with torch.no_grad():
            vector = bert.eval()(torch.tensor([bert_tokenizer(text)]))[0]
        assert float(vector @ torch.tensor(encoder(text)) / vector.norm()) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ArtifactError, match="not a BERT"):
        load_bert(tmp_path)


def test_a_batch_holds_texts_of_equal_length() -> None:
    """Every text occurs once."""
    ids = [[1] * (3 + index % 4) for index in range(50)]
    groups = list(batches_by_length(ids, 12, random.Random(1)))
    assert sorted(index for group in groups for index in group) == list(range(50))
    assert all(len({len(ids[index]) for index in group}) == 1 for group in groups)
    assert max(len(group) * len(ids[group[0]]) for group in groups) <= 12


def test_a_teacher_learns_functions_and_is_kept(teacher: FunctionTeacher, published: Path, tmp_path: Path) -> None:
    """A row that three functions answer trains their sum; a saved teacher is not trained again."""
    probabilities = teacher.probabilities([row.text for row in ROWS])
    assert probabilities.sum(-1).tolist() == pytest.approx([1.0] * len(ROWS), abs=1e-4)
    assert accuracy(teacher, ROWS) == 1.0
    assert float((probabilities * answer_mask(ROWS, NAMES)).sum(-1).mean()) > 0.5
    torch.save(teacher.state_dict(), tmp_path / TEACHER)
    loaded = load_or_train_teacher(published, [], NAMES, tmp_path / TEACHER, seed=2, progress=lambda _: None)
    assert torch.equal(loaded.probabilities([TEXTS[0]]), teacher.probabilities([TEXTS[0]]))


def test_only_confident_predictions_become_soft_labels(teacher: FunctionTeacher) -> None:
    """The best function comes first, and the probabilities sum to one."""
    labels, vectors = label_texts(teacher, TEXTS, lambda _: None)
    assert torch.from_numpy(vectors).float().numpy() == pytest.approx(teacher.vectors(TEXTS).numpy(), abs=0.05)
    assert {text for text, _ in labels} <= set(TEXTS)
    for _, probabilities in labels:
        assert sum(p for _, p in probabilities) == pytest.approx(1.0)
        assert probabilities[0][1] == max(p for _, p in probabilities) >= 0.4
    assert [probabilities[0][0] for text, probabilities in labels if text.startswith("turn")] == ["lights_on"] * 12


def test_paraphrases_consist_of_known_words_and_their_neighbours(teacher: FunctionTeacher) -> None:
    near = nearest_words(teacher, common_words(ROWS, least=2))
    assert all(word not in others for word, others in near.items())
    paraphrase = Paraphraser(ROWS, near, seed=3)
    made = [paraphrase(row) for row in ROWS for _ in range(6)]
    assert len(set(made) - {row.text for row in ROWS}) > 20
    assert {word for text in made for word in text.split()} <= {word for row in ROWS for word in row.text.split()}
    assert all(made)


def test_neighbours_include_words_that_no_row_has(teacher: FunctionTeacher) -> None:
    """A tokenizer's whole words follow the rows' words, and no word is its own neighbour."""
    words = common_words(ROWS, least=2)
    unseen = whole_words(teacher.tokenizer.pieces.listed)
    assert unseen
    assert all(len(word) > 2 and word.isalpha() for word in unseen)
    narrow, wide = nearest_words(teacher, words), nearest_words(teacher, words, unseen)
    assert all(wide[word][: len(narrow[word])] == narrow[word] for word in words)
    assert all(word not in others for word, others in wide.items())
    assert {one for others in wide.values() for one in others} - set(words)
    assert nearest_words(teacher, [], unseen) == {}


def test_texts_of_one_source_cross_at_a_shared_word() -> None:
    here, there = (
        Row("wake me at six tomorrow", "alarm", source="a"),
        Row("remind me of the cake", "remind", source="a"),
    )
    elsewhere = Row("sing me a song", "music", source="b")
    paraphrase = Paraphraser([here, there, elsewhere], {}, seed=1)
    made = {paraphrase(here) for _ in range(400)}
    assert "wake me of the cake" in made
    assert not any("song" in text for text in made)


def test_the_teacher_sees_fewer_easy_rows_and_more_rare_ones() -> None:
    """About a third of SNIPS, all of the others, and out-of-scope rows four times; reproducible by seed."""
    easy = [Row(f"play {number}", "PlayMusic", source="snips2017") for number in range(300)]
    rare = [Row("who am i", "oos", source="clinc150")]
    chosen = teacher_rows([*ROWS, *easy, *rare], seed=5)
    assert [row for row in chosen if row in ROWS] == ROWS
    assert chosen.count(rare[0]) == 4
    assert 70 < len([row for row in chosen if row in easy]) < 130
    assert chosen == teacher_rows([*ROWS, *easy, *rare], seed=5)


def test_a_soft_target_replaces_the_label() -> None:
    """The loss there is the cross entropy with the probabilities; the other losses are unchanged."""
    logits = torch.randn(3, 8, generator=torch.manual_seed(1))
    losses = torch.tensor([1.0, 2.0, 3.0])
    changed = soften(losses, logits, [(1, [(4, 0.75), (6, 0.25)])])
    logprobs = logits.log_softmax(-1)[1]
    assert changed.tolist() == pytest.approx([1.0, -float(0.75 * logprobs[4] + 0.25 * logprobs[6]), 3.0])
    assert soften(losses, logits, []) is losses


def test_a_network_learns_the_soft_probabilities(tmp_path: Path) -> None:
    """Two names at two thirds and one third, although the target names only the first."""
    example = Example([1, 5, 2], [7, 9], SOFT_LABELLED, soft_targets=[SoftTarget(1, [(9, 2 / 3), (11, 1 / 3)])])
    network = Llama(LlamaConfig(vocabulary=64, width=64, layers=2, heads=1, hidden=96))
    plan = TrainingPlan(minutes=5, steps=60, threads=1, warmup_steps=2, dropout=0.0, vector_lr=1e-2)
    Trainer(network, plan, tmp_path).run(lambda: [example], lambda *_: None)
    with torch.no_grad():
        probabilities = answer_logits(network, [example])[0][1].softmax(-1)
    assert float(probabilities[9]) == pytest.approx(2 / 3, abs=0.1)
    assert float(probabilities[11]) == pytest.approx(1 / 3, abs=0.1)


def test_an_epoch_draws_soft_labels_and_a_share_of_the_rows(tmp_path: Path) -> None:
    """Soft labels in the run's folder need no teacher."""
    labels = [(text, [("alarm_set", 0.6), ("lights_on", 0.4)]) for text in TEXTS]
    (tmp_path / SOFT_LABELS).write_bytes(msgspec.json.encode(labels))
    save_embeddings(TEXTS[:1], np.ones((1, 4)), tmp_path)
    soft_labels = FunctionSoftLabels.load_or_make(
        tmp_path / "missing", [], NAMES, tmp_path, seed=1, progress=lambda _: None
    )
    tokenizer = AssistantTokenizer.train([*TEXTS, *PIECES], [*NAMES, "out_of_scope"], ["time"], 60)
    rows = tuple(row for row in ROWS if row.source == "hwu64")
    assert soft_labels.embeddings is not None
    assert soft_labels.embeddings.index_of(TEXTS[0]) == 0
    mixture = Mixture(
        Corpus(rows, (), (), ()), tokenizer, student=False, seed=1, soft_labels=soft_labels, soft_label_count=5
    )
    drawn = [one for one in mixture.epoch() if one.source == SOFT_LABELLED]
    assert len(drawn) == 5
    assert all(len(one.target) == 2 for one in drawn)
    found = {tokenizer.decode([token]) for one in drawn for soft in one.soft_targets for token, _ in soft.probabilities}
    assert found == {'"alarm_set"', '"lights_on"'}
    few = Mixture(Corpus(rows, (), (), ()), tokenizer, student=False, seed=1, row_share=0.25).epoch()
    assert len([one for one in few if one.source == "hwu64"]) == len(rows) / 4
    assert not [one for one in Mixture(Corpus(rows, (), (), ()), tokenizer, False, 1).epoch() if one.soft_targets]


def test_all_texts_have_vectors_and_only_unlabelled_ones_soft_labels(
    teacher: FunctionTeacher, published: Path, tmp_path: Path
) -> None:
    torch.save(teacher.state_dict(), tmp_path / TEACHER)
    soft_labels = FunctionSoftLabels.load_or_make(published, ROWS, NAMES, tmp_path, seed=1, progress=lambda _: None)
    assert soft_labels.embeddings is not None
    assert NO_EMBEDDING not in [
        soft_labels.embeddings.index_of(text) for text in (*(row.text for row in ROWS), *dict(soft_labels.labels))
    ]
    assert not {text for text, _ in soft_labels.labels} & {row.text for row in ROWS if row.source == "hwu64"}
    index = soft_labels.embeddings.index_of(ROWS[0].text)
    (expected,) = torch.nn.functional.normalize(teacher.vectors([ROWS[0].text]), dim=-1)
    assert float(soft_labels.embeddings.vectors[index] @ expected) > 0.99


def test_soft_labels_of_the_device_separate_its_functions_from_refusals() -> None:
    """Its own functions are renormalised to 1; all others together are the probability of a refusal. Functions that
    are too similar to its own to be refused are left out.
    """
    soft_labels = FunctionSoftLabels(
        [
            ("wake me at six", [("alarm_set", 0.6), ("bank_top_up", 0.2), ("alarm_query", 0.2)]),
            ("top up my card", [("bank_top_up", 0.9), ("alarm_set", 0.1)]),
            ("ten minutes from now", [("timer", 0.7), ("alarm_set", 0.3)]),
        ]
    )
    names = ["alarm_set", "alarm_query", "bank_top_up", "timer", "out_of_scope"]
    tokenizer = AssistantTokenizer.train([*TEXTS, *PIECES], names, ["time"], 60)
    rows = tuple(row for row in ROWS if row.source == "hwu64")
    epoch = Mixture(Corpus(rows, (), (), ()), tokenizer, True, 1, soft_labels=soft_labels, soft_label_count=6).epoch()
    by_length = {len(one.target): one for one in epoch if one.source == SOFT_LABELLED}
    assert sorted(by_length) == [1, 2]
    opening = tokenizer.encode_call(FunctionCall("alarm_set"))[0]
    answered, refused = by_length[2].soft_targets, by_length[1].soft_targets
    assert [soft.position for soft in answered] == [0, 1]
    assert dict(answered[0].probabilities) == {opening: pytest.approx(0.8), tokenizer.refuse: pytest.approx(0.2)}
    assert {tokenizer.decode([token]): share for token, share in answered[1].probabilities} == {
        '"alarm_set"': pytest.approx(0.75),
        '"alarm_query"': pytest.approx(0.25),
    }
    assert by_length[1].target == [tokenizer.refuse]
    assert [dict(soft.probabilities) for soft in refused] == [
        {opening: pytest.approx(0.1), tokenizer.refuse: pytest.approx(0.9)}
    ]
