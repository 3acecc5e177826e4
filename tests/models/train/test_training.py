"""The training pipeline at a small scale: data → tokenizer → training → resume → distil → GGUF → 4-bit model."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest

from .requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402
from click.testing import CliRunner, Result  # noqa: E402

from causeway_server.models.catalog.artifact import ArtifactError  # noqa: E402
from causeway_server.models.catalog.gguf import read_gguf  # noqa: E402
from causeway_server.models.cli.commands import main as causeway_models  # noqa: E402
from causeway_train.assistant.batches import answer_accuracy, batches  # noqa: E402
from causeway_train.assistant.mixture import Corpus, Mixture  # noqa: E402
from causeway_train.assistant.trainer import CHECKPOINT, load_network  # noqa: E402
from causeway_train.cli.commands import main  # noqa: E402
from causeway_train.data.augmentation import Augmenter  # noqa: E402
from causeway_train.data.prompt_renderer import PromptRenderer  # noqa: E402
from causeway_train.evaluate.greedy import GreedyModel  # noqa: E402
from causeway_train.export.gguf_writer import GGUFMetadata, write_gguf  # noqa: E402
from causeway_train.function_calls.call import FunctionCall, expected_call, slot_spans  # noqa: E402
from causeway_train.function_calls.dataset import Row  # noqa: E402
from causeway_train.network.induction_heads import write_induction_heads  # noqa: E402
from causeway_train.network.llama import Llama, LlamaConfig, grow  # noqa: E402
from causeway_train.network.tokenizer import REFUSE, AssistantTokenizer  # noqa: E402

pytestmark = pytest.mark.slow

ROOMS = ("kitchen", "living room", "garage", "hall", "café")
TIMES = ("six am", "noon", "half past nine", "7:30")
FUNCTIONS = ["alarm_set", "iot_hue_lighton", "qa_factoid", "out_of_scope"]
ARGUMENTS = ["time", "house_place"]


def rows() -> list[Row]:
    lights = [
        Row(f"turn on the light in the {room}", "iot_hue_lighton", (("house_place", room),), source="hwu64")
        for room in ROOMS
    ]
    alarms = [Row(f"wake me up at {time} please", "alarm_set", (("time", time),), source="hwu64") for time in TIMES]
    others = [Row(f"who was {who}", "qa_factoid", source="hwu64") for who in ("newton", "curie", "mozart", "tesla")]
    return lights + alarms + others


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a few rows and questions."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "intents").mkdir()
    (folder / "routing").mkdir()
    encode = msgspec.json.encode
    lines = [encode({"text": row.text, "intent": row.intent, "slots": row.slots}) for row in rows()]
    (folder / "intents" / "hwu64.jsonl").write_bytes(b"\n".join(lines * 4))
    questions = [encode({"prompt": f"Prove theorem {n} step by step, please.\nAnswer:", "weak": 1}) for n in range(20)]
    (folder / "routing" / "questions.jsonl").write_bytes(b"\n".join(questions))
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> AssistantTokenizer:
    return AssistantTokenizer.train([row.text for row in rows()] * 3, FUNCTIONS, ARGUMENTS, 120)


def random_network(tokenizer: AssistantTokenizer, layers: int = 2) -> Llama:
    """A network with random weights everywhere, also where training starts at zero."""
    torch.manual_seed(5)
    network = Llama(LlamaConfig(vocabulary=tokenizer.size, width=128, layers=layers, heads=2, hidden=192))
    for block in network.blocks:
        for linear in ("out", "down"):
            torch.nn.init.normal_(block.get_submodule(linear).get_parameter("weight"), std=0.08)
    torch.nn.init.normal_(network.embedding.weight, std=0.3)
    return network.eval()


def test_fixed_pieces_are_one_token_each_and_decode_to_json(tokenizer: AssistantTokenizer) -> None:
    call = FunctionCall("alarm_set", {"time": 'six "am"', "house_place": ["hall", "café"]})
    ids = tokenizer.encode_call(call)
    assert ids[-1] == tokenizer.end
    assert tokenizer.decode(ids) == msgspec.json.encode(call).decode()
    assert len(tokenizer.encode_call(FunctionCall("alarm_set"))) == 4
    assert tokenizer.encode_call(FunctionCall("out_of_scope"), refuse=True)[0] == tokenizer.refuse
    assert tokenizer.size % 64 == 0


def test_words_are_split_alike_with_and_without_a_space(tokenizer: AssistantTokenizer) -> None:
    """So that copying into a JSON string maps token to token."""
    for word in ("kitchen", "living", "newton", "please", "unseenword"):
        bare, spaced = tokenizer.encode_batch([word, f" {word}"])
        written, expected = ("".join(tokenizer.bpe.id_to_token(token) or "" for token in ids) for ids in (spaced, bare))
        assert written.removeprefix("Ġ") == expected
        assert len(spaced) - len(bare) in (0, 1)


def test_variants_keep_correct_labels() -> None:
    source = rows()
    augmenter = Augmenter(source, seed=3)
    changed = 0
    for row in source * 30:
        variant = augmenter.variant(row)
        changed += variant.text != row.text
        assert variant.intent == row.intent
        assert [slot for slot, _ in variant.slots] == [slot for slot, _ in row.slots]
        assert slot_spans(variant) is not None
        assert list(expected_call(variant).arguments.values()) == [value for _, value in variant.slots]
    assert changed > 100


def test_places_are_replaced_by_other_kinds_of_places() -> None:
    """A city may become a state or a country; the place after a city remains one of those, from its own list."""
    places = {"city": {"Rome", "Ely"}, "state": {"Ohio", "Utah"}, "country": {"Peru", "Chad"}}
    source = [
        Row(f"rain in {value} today", "GetWeather", ((kind, value),), source="snips2017")
        for kind, values in places.items()
        for value in sorted(values)
    ]
    both = Row("rain in Rome Ohio", "GetWeather", (("city", "Rome"), ("state", "Ohio")), source="snips2017")
    augmenter = Augmenter([*source, both], seed=3)
    alone = {augmenter.variant(source[0]).slots[0] for _ in range(200)}
    assert {kind for kind, _ in alone} == set(places)
    paired = [augmenter.variant(both).slots for _ in range(200)]
    assert {slots[0][0] for slots in paired} == {"city"}
    assert {slots[1][0] for slots in paired} == {"state", "country"}
    for kind, value in [*alone, *(slots[1] for slots in paired)]:
        assert kind == "city" or value in places[kind]


def test_held_back_rows_never_reach_training(data: Path, tokenizer: AssistantTokenizer) -> None:
    corpus = Corpus.read(data)
    held = {row.text for row in corpus.validation}
    assert held
    assert not held & {row.text for row in corpus.train}
    assert not set(corpus.questions) & set(corpus.held_questions)
    student = Mixture(corpus, tokenizer, student=True, seed=1, refusals=40).epoch()
    assert any(example.target[0] == tokenizer.refuse for example in student)
    teacher = Mixture(corpus, tokenizer, student=False, seed=1).epoch()
    assert not any(tokenizer.refuse in example.target for example in teacher)


def test_batches_hold_every_example_once_within_the_token_budget(data: Path, tokenizer: AssistantTokenizer) -> None:
    examples = Mixture(Corpus.read(data), tokenizer, student=True, seed=1, refusals=40).epoch()
    made = list(batches(examples, 600, random.Random(1)))
    assert sorted(id(one) for batch in made for one in batch) == sorted(id(one) for one in examples)
    widths = [len(batch) * max(len(one.prompt) + len(one.target) for one in batch) for batch in made if len(batch) > 1]
    assert max(widths) <= 600


def test_a_grown_network_computes_the_same_logits(tokenizer: AssistantTokenizer) -> None:
    small = random_network(tokenizer)
    large = grow(small, msgspec.structs.replace(small.shape, layers=5)).eval()
    ids = torch.tensor([tokenizer.prompt(tokenizer.encode_batch(["wake me up at noon"])[0])])
    assert torch.allclose(small(ids), large(ids), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "size"), [({"layers": 1}, "1 layers"), ({"width": 256}, "width 256"), ({"hidden": 256}, "hidden 256")]
)
def test_only_the_depth_can_grow(tokenizer: AssistantTokenizer, change: dict[str, int], size: str) -> None:
    """The error names both sizes."""
    small = random_network(tokenizer)
    with pytest.raises(ArtifactError, match=f"{small.shape.layers} layers.*{size}.*only the depth"):
        grow(small, msgspec.structs.replace(small.shape, **change))


def test_training_from_a_published_model_keeps_its_size(
    data: Path, tokenizer: AssistantTokenizer, tmp_path: Path
) -> None:
    """`--layers` may add depth but not remove it, and a refused run writes nothing. A run of another size is not
    resumed.
    """
    path, run = tmp_path / "f32.gguf", tmp_path / "run"
    small = random_network(tokenizer)
    write_gguf(small, tokenizer, path, GGUFMetadata("tiny", "a test"))
    begin = ["train", "assistant", "--data", str(data), "--from", str(path), "--steps", "1", "--threads", "1"]

    def call(*more: object) -> Result:
        return CliRunner().invoke(main, [*begin, *(str(one) for one in more)])

    assert call("--run", run).exit_code == 0
    assert load_network(run / CHECKPOINT).shape == small.shape
    deeper = call("--run", tmp_path / "deep", "--layers", small.shape.layers + 1)
    assert deeper.exit_code == 0, deeper.output
    assert load_network(tmp_path / "deep" / CHECKPOINT).shape.layers == small.shape.layers + 1
    refused = call("--run", tmp_path / "flat", "--layers", 1)
    assert (refused.exit_code, "only the depth can grow" in refused.output) == (1, True)
    assert not (tmp_path / "flat" / CHECKPOINT).exists()
    other = call("--run", run, "--layers", small.shape.layers + 1)
    assert (other.exit_code, "another folder" in other.output) == (1, True)


def test_a_function_that_the_tokenizer_does_not_know_is_an_error_before_the_training(
    tmp_path: Path, data: Path, tokenizer: AssistantTokenizer
) -> None:
    """The message names it and says what to do."""
    path, more = tmp_path / "small.gguf", tmp_path / "more"
    write_gguf(random_network(tokenizer), tokenizer, path, GGUFMetadata("tiny", "a test"))
    shutil.copytree(data, more)
    line = msgspec.json.encode({"text": "flip a coin", "intent": "flip_coin", "slots": []})
    (more / "intents" / "clinc150.jsonl").write_bytes(b"\n".join([line] * 20))
    flags = {"--data": more, "--from": path, "--run": tmp_path / "run", "--steps": 1}
    arguments = [str(part) for flag in flags.items() for part in flag]
    refused = CliRunner().invoke(main, ["train", "assistant", *arguments])
    assert refused.exit_code == 1
    assert "the tokenizer has no token for flip_coin" in refused.output
    assert "without --from" in refused.output


def test_a_new_network_copies_before_training() -> None:
    """The hand-set heads repeat what followed the current token before, most of the time."""
    torch.manual_seed(2)
    network = Llama(LlamaConfig(vocabulary=512, width=256, layers=3, heads=4, hidden=256)).eval()
    write_induction_heads(network)
    ids = torch.stack([torch.randperm(512)[:30] for _ in range(20)])
    repeated = torch.cat([ids, ids], dim=1)
    with torch.no_grad():
        predicted = network(repeated[:, :-1]).argmax(-1)[:, 30:]
    assert (predicted == ids[:, 1:]).float().mean() > 0.7


def test_gguf_agrees_with_torch(tokenizer: AssistantTokenizer, tmp_path: Path) -> None:
    """Same tokens, and the same logits within 1e-3, at every position."""
    network = random_network(tokenizer)
    path = tmp_path / "f32.gguf"
    write_gguf(network, tokenizer, path, GGUFMetadata("tiny", "a test"))
    texts = ["wake me up at six am", "turn on the light in the café", 'odd "quotes", {braces} and 12:45!', ""]
    with GreedyModel(path, slots=2, context=512, threads=1, exact_cache=True) as model:
        prompter = PromptRenderer(model.chat_template)
        for text in texts:
            ids = model.tokenize(prompter.user(text))
            assert ids == tokenizer.last_prompt(text, tokenizer.encode_batch([text])[0])
            with torch.no_grad():
                expected = network(torch.tensor([ids]))[0].numpy()
            assert abs(model.logits(ids) - expected).max() < 1e-3


def test_the_pipeline_ends_in_a_4_bit_model_that_llama_cpp_runs(data: Path, tmp_path: Path) -> None:
    """train → resume → distil → export → average → quantize → publish → evaluate, by the command line alone."""

    def call(*arguments: object) -> str:
        group = causeway_models if arguments[0] == "verify" else main
        result = CliRunner().invoke(group, [str(one) for one in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    small = ("--width", 64, "--layers", 1, "--threads", 1)
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    call("train", "assistant-large", "--data", data, "--run", teacher, "--steps", 3, *small)
    assert "resumed at step 3" in call(
        "train", "assistant-large", "--data", data, "--run", teacher, "--steps", 6, *small
    )
    assert load_network(teacher / CHECKPOINT).shape.width == 64
    folders = ("--data", data, "--teacher", teacher, "--student", teacher, "--run", student, "--threads", 1)
    call("distill-assistant", *folders, "--steps", 6)
    log = [msgspec.json.decode(line) for line in (student / "log.jsonl").read_bytes().splitlines()]
    assert log[-1]["step"] == 6
    f32, q4 = tmp_path / "f32.gguf", tmp_path / "q4.gguf"
    call("export", student, new := tmp_path / "new.gguf")
    call("export", teacher, old := tmp_path / "old.gguf")
    call("average", old, new, f32, "--share", 0.6)
    matrix = tmp_path / "importance.npz"
    call("importance", student, matrix, "--data", data, "--examples", 40)
    file = data / "intents" / "hwu64.jsonl"
    compared = call("compare", f32, file, "--all-rows", "--limit", 6, "--work", tmp_path, "--importance", matrix)
    assert [line.split(",")[0].rsplit(maxsplit=1)[0].strip() for line in compared.splitlines()[1:]] == [
        *("F32", "Q8_0", "Q4_0", "Q4_0 imatrix", "Q4_K_M", "Q4_K_M imatrix")
    ]
    call("quantize", f32, q4, "--to", "Q4_0", "--embedding-too", "--importance", matrix)
    assert read_gguf(q4).quantisation == "Q4_0"
    assert read_gguf(q4).refuse_token == REFUSE
    call("publish", q4, "--name", "mine", "--to", tmp_path / "models", "--command", "a test")
    table = call(
        "evaluate",
        file,
        "--model",
        "mine",
        "--models",
        tmp_path / "models",
        "--limit",
        8,
        "--format",
        "json",
        "--threads",
        1,
    )
    report = msgspec.json.decode(table)[0]
    assert sum(result["rows"] for result in report["results"]) == 8
    assert "ok" in call("verify", "mine", "--models", tmp_path / "models")


def test_training_fits_a_dozen_rows(data: Path, tokenizer: AssistantTokenizer, tmp_path: Path) -> None:
    from causeway_train.assistant.mixture import Example
    from causeway_train.assistant.trainer import Trainer, TrainingPlan

    prompts = tokenizer.encode_batch([row.text for row in rows()])
    examples = [
        Example(tokenizer.prompt(ids), tokenizer.encode_call(expected_call(row)), row.source)
        for ids, row in zip(prompts, rows(), strict=True)
    ]
    network = Llama(LlamaConfig(vocabulary=tokenizer.size, width=64, layers=2, heads=1, hidden=128))
    plan = TrainingPlan(minutes=5, steps=90, threads=1, warmup_steps=10, dropout=0.0)
    losses: list[float] = []
    trainer = Trainer(network, plan, tmp_path)
    trainer.run(lambda: examples, lambda _, loss: losses.append(loss))
    functions, exact = answer_accuracy(network, examples)
    assert functions > 0.9
    assert exact > 0.7
