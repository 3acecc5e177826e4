"""The examples of a training epoch, for the device's model (the student) and for the large one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from ..auxiliary_losses.attention_loss import NO_TARGET, attention_targets
from ..auxiliary_losses.embedding_loss import NO_EMBEDDING, SentenceEmbeddings
from ..auxiliary_losses.function_distillation import FunctionProbabilities, FunctionSoftLabels
from ..auxiliary_losses.tagging_loss import SlotLabels
from ..data.augmentation import Augmenter
from ..data.corpus import Corpus as Corpus
from ..data.open_ended_prompts import OPEN_ENDED, open_ended_prompts
from ..function_calls.call import FunctionCall, expected_call
from ..function_calls.dataset import Row
from ..function_calls.intents import (
    DEVICE_LIKE,
    LABELLED,
    OUT_OF_SCOPE,
    functions_for,
    is_device_function,
    is_device_row,
    is_refusable,
)
from ..network.tokenizer import AssistantTokenizer

SLOTTED = ("hwu64", "snips2017", LABELLED)  # sources whose rows have argument labels
# Sources of examples that are no rows: to be refused, soft-labelled, and copying exercises.
REFUSED, SOFT_LABELLED, COPYING = "refused", "soft_labelled", "copying"
COPIES = 900  # copying exercises in an epoch
FUNCTION_INDEX = 1  # index of the function's name in an answer
# Share of the device's examples with token dropout, and of the tokens dropped in them.
DROPOUT_EXAMPLES, TOKEN_DROPOUT = 0.5, 0.1
PLACES = frozenset(("city", "state", "country", "geographic_poi", "poi"))
EARLIER_TURN = 0.03  # share of examples with an unrelated exchange before them
QUESTION_CHARACTERS = 600  # longest part of a long question


class SoftTarget(msgspec.Struct, frozen=True):
    """Probabilities over the tokens at one position of a target, in place of a single correct token."""

    position: int
    probabilities: list[tuple[int, float]]


class Example(msgspec.Struct, frozen=True):
    """Token ids of a prompt and its answer; the loss is on the answer alone."""

    prompt: list[int]
    target: list[int]
    source: str = ""
    embedding: int = NO_EMBEDDING  # index of the prompt's sentence vector
    attention_targets: list[int] = []  # for each token of the target: a prompt position, or NO_TARGET
    slot_tags: list[int] = []  # slot tags of the tokens, up to the one before the prompt's last token
    soft_targets: list[SoftTarget] = []


class _SoftLabelledText:
    """A text with the probabilities of all functions, and the probabilities of the device's own functions renormalised
    to 1.
    """

    def __init__(self, text: str, probabilities: FunctionProbabilities) -> None:
        self.text, self.probabilities = text, probabilities
        device = [(function, share) for function, share in probabilities if is_device_function(function)]
        device_total = sum(share for _, share in device)
        total = sum(share for function, share in probabilities if function not in DEVICE_LIKE)
        best = probabilities[0][0]
        self.device_probabilities = [(function, share / device_total) for function, share in device]
        self.on_device = device_total / total if total else 0.0  # probability that the device answers it itself
        self.best_on_device, self.best_like_device = is_device_function(best), best in DEVICE_LIKE


class Mixture:
    """Draws the examples of one epoch after the other."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: AssistantTokenizer,
        student: bool,
        seed: int,
        *,
        refusals: int = 6000,
        hwu64_repeats: int = 2,
        row_share: float = 1.0,
        embeddings: SentenceEmbeddings | None = None,
        slot_labels: SlotLabels | None = None,
        soft_labels: FunctionSoftLabels | None = None,
        soft_label_count: int = 0,
    ) -> None:
        """Prepare the sources of examples.

        Args:
            student: draw for the device's model, which refuses requests outside its domain.
            refusals: examples to refuse in an epoch (student).
            hwu64_repeats: how often an epoch holds each row of HWU64 (student).
            row_share: share of the rows in an epoch (large model).
            soft_label_count: soft-labelled texts in an epoch; for the student, half of them in its own domain.
        """
        self._slot_labels, self._row_share = slot_labels, row_share
        self._soft_label_count = soft_label_count
        self._soft_labelled = [_SoftLabelledText(*label) for label in (soft_labels.labels if soft_labels else [])]
        self._embeddings, self._hwu64_repeats = embeddings, hwu64_repeats
        self._corpus, self._tokenizer, self._student, self._refusals = corpus, tokenizer, student, refusals
        self._random = random.Random(seed)
        rows = [*corpus.train, *corpus.pseudo_labelled]
        self._augmenter = Augmenter(rows, seed)
        self._device_rows = [row for row in rows if is_device_row(row.source, row.intent)]
        self._refusable_rows = [row for row in corpus.train if is_refusable(row.source, row.intent)]
        self._out_of_scope = [row for row in corpus.train if row.intent == "oos"]

    def epoch(self) -> list[Example]:
        """Return the examples of the next epoch, shuffled."""
        rows = self._draw_device_rows() if self._student else self._draw_all_rows()
        refused = self._refused_texts()
        prompts = self._tokenizer.encode_batch([row.text for row in rows] + refused)
        examples = [self._row_example(row, ids) for row, ids in zip(rows, prompts, strict=False)]
        refusal = self._tokenizer.encode_call(FunctionCall(OUT_OF_SCOPE), refuse=self._student)
        examples += [
            Example(self._tokenizer.last_prompt(text, ids), refusal, REFUSED, embedding=self._embedding(text))
            for text, ids in zip(refused, prompts[len(rows) :], strict=True)
        ]
        examples += self._copying_exercises(COPIES)
        examples += self._soft_label_examples()
        self._random.shuffle(examples)
        return [self._add_earlier_turn(example, examples) for example in examples]

    def _draw_device_rows(self) -> list[Row]:
        """Draw variants of the device's rows.

        HWU64 has fewer rows and more functions, so its rows are repeated; rows that name places are doubled, because
        the network has to memorise which names are states and which are countries.
        """
        rows = [row for row in self._device_rows for _ in range(self._hwu64_repeats if row.source == "hwu64" else 1)]
        rows += [row for row in self._device_rows if any(slot in PLACES for slot, _ in row.slots)]
        return [self._augmenter.variant(row) for row in rows]

    def _draw_all_rows(self) -> list[Row]:
        candidates = [*self._corpus.train, *self._corpus.pseudo_labelled]
        rows = [row for row in candidates if row.intent != "oos" and not _ambiguous(row)]
        drawn = rows if self._row_share == 1.0 else self._random.sample(rows, round(self._row_share * len(rows)))
        return [self._augmenter.variant(row) for row in drawn]

    def _refused_texts(self) -> list[str]:
        if not self._student:
            open_ended = open_ended_prompts(self._random, 600, OPEN_ENDED)
            return [row.text for row in self._out_of_scope] * 4 + open_ended + self._draw_questions(300)
        by_source = {
            name: [row for row in self._refusable_rows if row.source == name]
            for name in ("hwu64", "clinc150", "banking77")
        }
        share = {"hwu64": 0.36, "clinc150": 0.38, "banking77": 0.08}
        drawn = [
            self._augmenter.variant(row).text
            for name, rows in by_source.items()
            for row in self._random.sample(rows, min(len(rows), int(self._refusals * share[name])))
        ]
        drawn += [row.text for row in self._out_of_scope] * 2
        drawn += open_ended_prompts(self._random, int(self._refusals * 0.1))
        return drawn + self._draw_questions(int(self._refusals * 0.05))

    def _draw_questions(self, count: int) -> list[str]:
        """Draw long questions, cut at a random length, so that the model learns that long texts are out of scope
        too.
        """
        draw = self._random
        chosen = draw.sample(self._corpus.questions, min(count, len(self._corpus.questions)))
        return [text[: int(30 + (QUESTION_CHARACTERS - 30) * draw.random() ** 3)].strip() for text in chosen]

    def _copying_exercises(self, count: int) -> list[Example]:
        """Draw exercises that continue a list of random words from one of its words. Copying takes a small network
        longest to learn.
        """
        exercises = []
        for ids in self._tokenizer.encode_batch(
            [self._augmenter.random_words(self._random.randint(5, 14)) for _ in range(count)]
        ):
            start = self._random.randrange(max(1, len(ids) - 3))
            prompt = [*self._tokenizer.prompt(ids), ids[start]]
            positions = [*range(start + 2, len(ids) + 2)]
            target = [*ids[start + 1 :], self._tokenizer.end]
            exercises.append(Example(prompt, target, COPYING, attention_targets=positions))
        return exercises

    def _row_example(self, row: Row, text_ids: Sequence[int]) -> Example:
        target = self._tokenizer.encode_call(expected_call(row))
        if row.source == "clinc150" and len(functions_for(row.source, row.intent)) == 1 and _merged(row):
            target = target[:2]  # only the function's name: the arguments are not labelled
        positions = attention_targets(row, target, self._tokenizer)
        text_ids = self._drop_tokens(text_ids, positions) if self._student else text_ids
        prompt = self._tokenizer.last_prompt(row.text, text_ids)
        shift = len(prompt) - len(text_ids) - 2  # tokens before the last repetition, without <|user|>
        positions = [position + shift if position != NO_TARGET else NO_TARGET for position in positions]
        tags = self._slot_labels.tags(row, self._tokenizer) if self._slot_labels and row.source in SLOTTED else []
        return Example(prompt, target, row.source, self._embedding(row.text), positions, tags)

    def _soft_label_examples(self) -> list[Example]:
        """Make examples for the function's name alone and, on the device, for whether to refuse."""
        count = self._soft_label_count
        if self._student:
            inside = [one for one in self._soft_labelled if one.best_on_device]
            outside = [one for one in self._soft_labelled if not one.best_on_device and not one.best_like_device]
            chosen = self._draw(inside, count // 2) + self._draw(outside, count - count // 2)
        else:
            chosen = self._draw(self._soft_labelled, count)
        prompts = self._tokenizer.encode_batch([one.text for one in chosen])
        return [self._soft_label_example(one, ids) for one, ids in zip(chosen, prompts, strict=True)]

    def _draw(self, texts: Sequence[_SoftLabelledText], count: int) -> list[_SoftLabelledText]:
        return self._random.sample(texts, min(count, len(texts)))

    def _soft_label_example(self, one: _SoftLabelledText, ids: Sequence[int]) -> Example:
        tokenizer = self._tokenizer
        probabilities = one.device_probabilities if self._student else one.probabilities
        best = probabilities[0][0] if probabilities else OUT_OF_SCOPE
        answer = tokenizer.encode_call(FunctionCall(best))[:2]
        tokens = [(tokenizer.function_token(function), share) for function, share in probabilities]
        soft_targets = [SoftTarget(FUNCTION_INDEX, tokens)]
        if self._student:
            opening = SoftTarget(0, [(answer[0], one.on_device), (tokenizer.refuse, 1.0 - one.on_device)])
            soft_targets = [opening, *soft_targets] if one.best_on_device else [opening]
            answer = answer if one.best_on_device else [tokenizer.refuse]
        prompt = tokenizer.last_prompt(one.text, ids)
        return Example(prompt, answer, SOFT_LABELLED, self._embedding(one.text), soft_targets=soft_targets)

    def _embedding(self, text: str) -> int:
        return self._embeddings.index_of(text) if self._embeddings else NO_EMBEDDING

    def _drop_tokens(self, text_ids: Sequence[int], positions: Sequence[int]) -> Sequence[int]:
        """Sometimes replace tokens outside the arguments by padding, so that the network does not rely on a single
        token.

        Word dropout: Iyyer et al. 2015, Deep Averaging Networks.
        """
        if self._random.random() >= DROPOUT_EXAMPLES:
            return text_ids
        arguments = {position - 1 for position in positions}  # <|user|> is the first token of the prompt
        return [
            self._tokenizer.pad if index not in arguments and self._random.random() < TOKEN_DROPOUT else token
            for index, token in enumerate(text_ids)
        ]

    def _add_earlier_turn(self, example: Example, others: Sequence[Example]) -> Example:
        if example.source == COPYING or self._random.random() >= EARLIER_TURN:
            return example
        earlier = self._random.choice(others)
        if earlier.source == COPYING or earlier.target[-1] != self._tokenizer.end or len(earlier.prompt) > 60:
            return example
        answer = [token for token in earlier.target if token != self._tokenizer.refuse]
        prompt = self._tokenizer.earlier_prompt(earlier.prompt)
        shift = len(prompt) + len(answer)
        positions = [one + shift if one != NO_TARGET else NO_TARGET for one in example.attention_targets]
        return msgspec.structs.replace(example, prompt=[*prompt, *answer, *example.prompt], attention_targets=positions)


def validation_examples(
    corpus: Corpus, tokenizer: AssistantTokenizer, student: bool, per_source: int
) -> dict[str, list[Example]]:
    """Return at most `per_source` held-back examples by source; `refused` are those that this model should refuse."""
    draw = random.Random(7)
    groups: dict[str, list[tuple[str, list[int]]]] = {REFUSED: []}
    refusal = tokenizer.encode_call(FunctionCall(OUT_OF_SCOPE), refuse=student)[: 1 if student else 2]
    for row in corpus.validation:
        if row.intent == "oos" or (student and is_refusable(row.source, row.intent)):
            groups[REFUSED].append((row.text, refusal))
        elif is_device_row(row.source, row.intent) or (not student and not _ambiguous(row)):
            target = tokenizer.encode_call(expected_call(row))
            groups.setdefault(row.source, []).append((row.text, target[:2] if _merged(row) else target))
    groups["questions"] = [(text[:QUESTION_CHARACTERS], refusal) for text in corpus.held_questions]
    examples = {}
    for name, pairs in groups.items():
        chosen = draw.sample(pairs, min(per_source, len(pairs)))
        prompts = tokenizer.encode_batch([text for text, _ in chosen])
        examples[name] = [
            Example(tokenizer.last_prompt(text, ids), target, name)
            for ids, (text, target) in zip(prompts, chosen, strict=True)
        ]
    return examples


def _merged(row: Row) -> bool:
    return row.source == "clinc150" and functions_for(row.source, row.intent) != (row.intent,)


def _ambiguous(row: Row) -> bool:
    return len(functions_for(row.source, row.intent)) > 1
