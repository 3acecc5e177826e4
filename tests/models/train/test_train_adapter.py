"""`causeway-train train-adapter`: labelled rows into an adapter of a tiny student."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from causeway_server.models.cli.commands import main as causeway_models  # noqa: E402
from causeway_train.cli.commands import main  # noqa: E402
from causeway_train.data.corpus import Corpus  # noqa: E402
from causeway_train.distill.calls import call_examples  # noqa: E402
from causeway_train.distill.examples import ExampleEncoder  # noqa: E402
from causeway_train.distill.network import Student  # noqa: E402
from causeway_train.distill.row_states import RowStates  # noqa: E402
from causeway_train.distill.teacher import TeacherAnswer  # noqa: E402
from causeway_train.distill.trainer import AdapterPlan, AdapterTrainer, LearnedAnswer, batches_of  # noqa: E402
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROOMS, FRAMES = ("kitchen", "room", "table"), ("turn {} the light in the {}", "please {} light {}", "{} the {} light")


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows of two functions of the device with a slot, and rows to refuse."""
    rows: list[dict[str, object]] = []
    for frame in FRAMES:
        for room in ROOMS:
            for side in ("on", "off"):
                slots = [["house_place", room]]
                rows.append({"text": frame.format(side, room), "intent": f"iot_hue_light{side}", "slots": slots})
    rows += [{"text": f"who is {word}", "intent": "qa_factoid"} for word in ("it", "what", "me", "you")]
    folder = tmp_path / "data" / "intents"
    folder.mkdir(parents=True)
    (folder / "hwu64.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def test_the_states_of_a_row_are_those_of_the_whole_network(student: Path) -> None:
    """They are the same when they are computed, when they are known, and without room for them."""
    made = Student(student, 4, first_layer=1, dtype=torch.float32)
    rows = [(30, 31, 32), (40, 41), (30, 31, 32)]
    ids, wanted = torch.tensor([[30, 31, 32], [40, 41, 0], [30, 31, 32]]), torch.ones(3, 3, dtype=torch.bool)
    with torch.no_grad():
        expected = made([7, 8], ids, wanted).view(3, 3, -1)
        for states in (RowStates(made, (7, 8), 1 << 20), RowStates(made, (7, 8), 0)):
            for _ in range(2):
                found = made.upper(states.of(rows), 2, wanted).view(3, 3, -1)
                assert torch.allclose(found[0], expected[0], atol=1e-5)
                assert torch.allclose(found[1, :2], expected[1, :2], atol=1e-5)
                assert torch.allclose(found[2], expected[0], atol=1e-5)


def test_a_resumed_run_learns_the_rest_of_the_epoch() -> None:
    """Each row is learned once in an epoch, also if the run stops in its middle; another epoch has another order."""
    examples = [LearnedAnswer((1, 2, 3 + number % 5), (60 + number,) * (1 + number % 3)) for number in range(50)]
    plan = AdapterPlan(1.0, batch_rows=4)
    whole, seen = batches_of(plan, examples, 0), 0
    for _ in range(20):
        resumed = batches_of(plan, examples, seen)
        batch = next(whole)
        assert batch == next(resumed)
        seen += sum(map(len, batch))
    epochs = []
    batches = batches_of(plan, examples, 0)
    for _ in range(2):
        epoch: list[LearnedAnswer] = []
        while len(epoch) < len(examples):
            epoch += [one for part in next(batches) for one in part]
        epochs.append(epoch)
        assert len(epoch) == len(examples)
        assert set(epoch) == set(examples)
    assert epochs[0] != epochs[1]


def test_only_the_tokens_of_the_vocabulary_share_the_probability(tmp_path: Path, student: Path) -> None:
    """The loss of an answer whose token is the only one is 0."""
    example = LearnedAnswer((1, 2, 3), (60,))
    trainers = [
        AdapterTrainer(Student(student, 4, dtype=torch.float32), AdapterPlan(1.0), tmp_path / "run", vocabulary)
        for vocabulary in (None, {60, 61}, {60})
    ]
    whole, two, one = (trainer.loss_of([example], (1, 2)) for trainer in trainers)
    assert whole > two > one == 0.0


def test_a_row_is_learned_as_its_call_and_an_other_one_as_a_refusal(data: Path, student: Path) -> None:
    corpus = Corpus.read(data)
    made = call_examples(corpus, student, hwu64_repeats=1, refusals=20, seed=1)
    other = next(row.text for row in corpus.train if row.intent == "qa_factoid")
    with ExampleEncoder(student, 160) as encoder:
        answers = (
            '{"name":"iot_hue_lighton","arguments":{"house_place":"room"}}',
            '{"name":"out_of_scope","arguments":{}}',
        )
        call, refusal = (
            encoder.encode(text, TeacherAnswer(answer, "stop"))
            for text, answer in zip(("turn on the light in the room", other), answers, strict=True)
        )
    assert call in (*made.learned, *made.held)
    assert refusal in made.learned
    assert made.held
    assert made.vocabulary.issuperset(token for one in (*made.learned, *made.held) for token in one.answer)


def test_an_adapter_learns_the_calls_and_is_added_to_its_model(tmp_path: Path, data: Path, student: Path) -> None:
    """A second call with more epochs resumes."""
    run, models = tmp_path / "run", ["--models", str(tmp_path / "models")]
    given = ["train-adapter", "--student", str(student), "--data", str(data), "--run", str(run), "--first-layer", "1"]
    plan = ["--rank", "8", "--learning-rate", "0.01", "--batch-rows", "8", "--report-minutes", "0", "--refusals", "10"]
    first = CliRunner().invoke(main, [*given, *plan, "--epochs", "1"])
    assert first.exit_code == 0, first.output
    again = CliRunner().invoke(main, [*given, *plan, "--epochs", "24"])
    assert again.exit_code == 0, again.output
    assert "The training resumes at step" in again.output
    added = CliRunner().invoke(causeway_models, ["add", str(student), "--name", "base", "--to", models[1]])
    assert added.exit_code == 0, added.output
    command = ["add-adapter", "base", str(run / "adapter.gguf"), "--name", "commands", "--calls", *models]
    assert CliRunner().invoke(causeway_models, command).exit_code == 0
    rows = str(data / "intents" / "hwu64.jsonl")
    asked = ["evaluate", rows, "--model", "base", "--model", "base+commands", "--grammar", "--format", "json", *models]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    base, adapted = ({one["group"]: one for one in report["results"]} for report in json.loads(result.stdout))
    assert base["hwu64-device"]["exact"] == 0
    assert adapted["hwu64-device"]["exact"] > 0.5
    assert adapted["hwu64-device"]["valid"] == 1
