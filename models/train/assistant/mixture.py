"""Which examples an epoch is made of, for the device's model and for the large one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from ...function_calls.call import FunctionCall, expected_call
from ...function_calls.dataset import Row
from ...function_calls.intents import (
    DEVICE_LIKE,
    LABELLED,
    OUT_OF_SCOPE,
    functions_for,
    is_device_function,
    is_device_row,
    is_refusable,
)
from ..auxiliary_losses.attention_loss import NOWHERE, sources
from ..auxiliary_losses.embedding_loss import UNKNOWN, SentenceEmbeddings
from ..auxiliary_losses.function_distillation import FunctionHints, Shares
from ..auxiliary_losses.tagging_loss import SlotLabels
from ..data.augmentation import Augmenter
from ..data.corpus import Corpus as Corpus
from ..data.open_ended_prompts import OPEN_ENDED, chatter
from ..network.tokenizer import AssistantTokenizer

SLOTTED = ("hwu64", "snips2017", LABELLED)  # the sources whose rows have their arguments marked
REFUSED = "refused"  # the source of examples to turn away
NAME = 1  # where in an answer the function's name is
HINTED = "hinted"  # the source of texts of which a tutor says what they ask for
COPIED, COPIES = "copied", 900  # exercises in copying, and how many an epoch has
MUMBLED, UNHEARD = 0.5, 0.1  # share of the device's examples with lost words, and of words lost in them
PLACES = frozenset(("city", "state", "country", "geographic_poi", "poi"))
TURN = 0.03  # share of examples with an unrelated exchange before them
QUESTION_CHARACTERS = 600  # of a long question, at most; often less


class FunctionHint(msgspec.Struct, frozen=True):
    """For one token of a target: the tokens that may stand there, and how probable they are (`hints`)."""

    place: int
    shares: list[tuple[int, float]]


class Example(msgspec.Struct, frozen=True):
    """Token ids of prompt and answer; the loss is on the answer alone."""

    prompt: list[int]
    target: list[int]
    source: str = ""
    meaning: int = UNKNOWN  # where the encoder's vector of the prompt is (`meaning.Meanings`)
    looks: list[int] = []  # for each token of the target: its place in the prompt (`pointing`), or NOWHERE
    tags: list[int] = []  # of the tokens before the prompt's last one (`tagging`)
    hints: list[FunctionHint] = []  # what a tutor says of some of the target's tokens


class _HintedText:
    """A text, and what the tutor makes of it: of all functions, and of the device's own."""

    def __init__(self, text: str, shares: Shares) -> None:
        self.text, self.shares = text, shares
        own = [(function, share) for function, share in shares if is_device_function(function)]
        kept = sum(share for _, share in own)
        whole = sum(share for function, share in shares if function not in DEVICE_LIKE)
        self.own = [(function, share / kept) for function, share in own]
        self.kept = kept / whole if whole else 0.0  # how probable it is that the device answers it itself
        self.is_own, self.is_like_own = is_device_function(shares[0][0]), shares[0][0] in DEVICE_LIKE


class Mixture:
    """Draws the examples of one epoch after the other."""

    def __init__(
        self,
        corpus: Corpus,
        vocabulary: AssistantTokenizer,
        student: bool,
        seed: int,
        *,
        refusals: int = 6000,
        repeats: int = 2,
        share: float = 1.0,
        meanings: SentenceEmbeddings | None = None,
        labels: SlotLabels | None = None,
        hints: FunctionHints | None = None,
        hinted: int = 0,
    ) -> None:
        """`hinted`: hints in an epoch, the device's half of its own functions; `share`: of the large model's rows."""
        self._labels, self._hinted, self._share = labels, hinted, share
        self._hints = [_HintedText(text, shares) for text, shares in (hints.told if hints else [])]
        self._meanings, self._repeats = meanings, repeats
        self._corpus, self._vocabulary, self._student, self._refusals = corpus, vocabulary, student, refusals
        self._random = random.Random(seed)
        self._augmenter = Augmenter([*corpus.train, *corpus.labelled], seed)
        self._own = [row for row in [*corpus.train, *corpus.labelled] if is_device_row(row.source, row.intent)]
        self._others = [row for row in corpus.train if is_refusable(row.source, row.intent)]
        self._oos = [row for row in corpus.train if row.intent == "oos"]

    def epoch(self) -> list[Example]:
        rows = self._device_rows() if self._student else self._all_rows()
        refused = self._refused_texts()
        prompts = self._vocabulary.texts([row.text for row in rows] + refused)
        examples = [self._answered(row, ids) for row, ids in zip(rows, prompts, strict=False)]
        refusal = self._vocabulary.call(FunctionCall(OUT_OF_SCOPE), refuse=self._student)
        examples += [
            Example(self._vocabulary.asked(text, ids), refusal, REFUSED, meaning=self._meaning(text))
            for text, ids in zip(refused, prompts[len(rows) :], strict=True)
        ]
        examples += self._copies(COPIES)
        examples += self._told()
        self._random.shuffle(examples)
        return [self._in_context(example, examples) for example in examples]

    def _device_rows(self) -> list[Row]:
        """HWU64 has fewer rows and more to learn: each comes more than once, in other variants. So do rows with places:
        which names are states and countries has to be known.
        """
        rows = [row for row in self._own for _ in range(self._repeats if row.source == "hwu64" else 1)]
        rows += [row for row in self._own if any(slot in PLACES for slot, _ in row.slots)]
        return [self._augmenter.variant(row) for row in rows]

    def _all_rows(self) -> list[Row]:
        rows = [
            row for row in [*self._corpus.train, *self._corpus.labelled] if row.intent != "oos" and not _ambiguous(row)
        ]
        drawn = rows if self._share == 1.0 else self._random.sample(rows, round(self._share * len(rows)))
        return [self._augmenter.variant(row) for row in drawn]

    def _refused_texts(self) -> list[str]:
        if not self._student:
            open_ended = chatter(self._random, 600, OPEN_ENDED)
            return [row.text for row in self._oos] * 4 + open_ended + self._some_questions(300)
        by_source = {
            name: [row for row in self._others if row.source == name] for name in ("hwu64", "clinc150", "banking77")
        }
        share = {"hwu64": 0.36, "clinc150": 0.38, "banking77": 0.08}
        drawn = [
            self._augmenter.variant(row).text
            for name, rows in by_source.items()
            for row in self._random.sample(rows, min(len(rows), int(self._refusals * share[name])))
        ]
        drawn += [row.text for row in self._oos] * 2 + chatter(self._random, int(self._refusals * 0.1))
        return drawn + self._some_questions(int(self._refusals * 0.05))

    def _some_questions(self, count: int) -> list[str]:
        """Long questions, cut at random: what is long is out of scope too."""
        draw = self._random
        chosen = draw.sample(self._corpus.questions, min(count, len(self._corpus.questions)))
        return [text[: int(30 + (QUESTION_CHARACTERS - 30) * draw.random() ** 3)].strip() for text in chosen]

    def _copies(self, count: int) -> list[Example]:
        """Go on from where you were in a made-up list of words: nothing but copying, which is what takes longest to
        learn.
        """
        made = []
        for ids in self._vocabulary.texts(
            [self._augmenter.nonsense(self._random.randint(5, 14)) for _ in range(count)]
        ):
            start = self._random.randrange(max(1, len(ids) - 3))
            prompt = [*self._vocabulary.prompt(ids), ids[start]]
            looks = [*range(start + 2, len(ids) + 2)]
            made.append(Example(prompt, [*ids[start + 1 :], self._vocabulary.end], COPIED, looks=looks))
        return made

    def _answered(self, row: Row, text_ids: Sequence[int]) -> Example:
        target = self._vocabulary.call(expected_call(row))
        if row.source == "clinc150" and len(functions_for(row.source, row.intent)) == 1 and _merged(row):
            target = target[:2]  # the function's name: its arguments are not labelled here
        looks = sources(row, target, self._vocabulary)
        text_ids = self._mumbled(text_ids, looks) if self._student else text_ids
        prompt = self._vocabulary.asked(row.text, text_ids)
        again = len(prompt) - len(text_ids) - 2  # tokens before the last reading, but for <|user|>
        looks = [look + again if look != NOWHERE else NOWHERE for look in looks]
        tags = self._labels.tags(row, self._vocabulary) if self._labels and row.source in SLOTTED else []
        return Example(prompt, target, row.source, self._meaning(row.text), looks, tags)

    def _told(self) -> list[Example]:
        """Texts with a tutor's hint: nothing but the function's name can be learnt from them, and on the device whether
        it is one of its own.
        """
        if self._student:
            own = [one for one in self._hints if one.is_own]
            others = [one for one in self._hints if not one.is_own and not one.is_like_own]
            chosen = self._drawn(own, self._hinted // 2) + self._drawn(others, self._hinted - self._hinted // 2)
        else:
            chosen = self._drawn(self._hints, self._hinted)
        prompts = self._vocabulary.texts([one.text for one in chosen])
        return [self._hinted_at(one, ids) for one, ids in zip(chosen, prompts, strict=True)]

    def _drawn(self, told: Sequence[_HintedText], count: int) -> list[_HintedText]:
        return self._random.sample(told, min(count, len(told)))

    def _hinted_at(self, one: _HintedText, ids: Sequence[int]) -> Example:
        vocabulary = self._vocabulary
        shares = one.own if self._student else one.shares
        answer = vocabulary.call(FunctionCall(shares[0][0] if shares else OUT_OF_SCOPE))[:2]
        hints = [FunctionHint(NAME, [(vocabulary.name(function), share) for function, share in shares])]
        if self._student:
            opening = FunctionHint(0, [(answer[0], one.kept), (vocabulary.refuse, 1.0 - one.kept)])
            answer, hints = (answer, [opening, *hints]) if one.is_own else ([vocabulary.refuse], [opening])
        return Example(vocabulary.asked(one.text, ids), answer, HINTED, self._meaning(one.text), hints=hints)

    def _meaning(self, text: str) -> int:
        return self._meanings.at(text) if self._meanings else UNKNOWN

    def _mumbled(self, text_ids: Sequence[int], looks: Sequence[int]) -> Sequence[int]:
        """Now and then words outside the arguments cannot be made out: no single one should decide (word dropout:
        Iyyer et al. 2015, Deep Averaging Networks).
        """
        if self._random.random() >= MUMBLED:
            return text_ids
        kept = {look - 1 for look in looks}  # the prompt leads with <|user|>
        return [
            self._vocabulary.pad if at not in kept and self._random.random() < UNHEARD else token
            for at, token in enumerate(text_ids)
        ]

    def _in_context(self, example: Example, others: Sequence[Example]) -> Example:
        if example.source == COPIED or self._random.random() >= TURN:
            return example
        before = self._random.choice(others)
        if before.source == COPIED or before.target[-1] != self._vocabulary.end or len(before.prompt) > 60:
            return example
        shown = [token for token in before.target if token != self._vocabulary.refuse]
        asked = self._vocabulary.once(before.prompt)
        shift = len(asked) + len(shown)
        looks = [look + shift if look != NOWHERE else NOWHERE for look in example.looks]
        return msgspec.structs.replace(example, prompt=[*asked, *shown, *example.prompt], looks=looks)


def validation_examples(
    corpus: Corpus, vocabulary: AssistantTokenizer, student: bool, per_source: int, seed: int = 7
) -> dict[str, list[Example]]:
    """Held-back examples by source, and `refused`: what this model should turn away."""
    draw = random.Random(seed)
    groups: dict[str, list[tuple[str, list[int]]]] = {REFUSED: []}
    refusal = vocabulary.call(FunctionCall(OUT_OF_SCOPE), refuse=student)[: 1 if student else 2]
    for row in corpus.validation:
        if row.intent == "oos" or (student and is_refusable(row.source, row.intent)):
            groups[REFUSED].append((row.text, refusal))
        elif is_device_row(row.source, row.intent) or (not student and not _ambiguous(row)):
            target = vocabulary.call(expected_call(row))
            groups.setdefault(row.source, []).append((row.text, target[:2] if _merged(row) else target))
    groups["questions"] = [(text[:QUESTION_CHARACTERS], refusal) for text in corpus.held_questions]
    examples = {}
    for name, pairs in groups.items():
        chosen = draw.sample(pairs, min(per_source, len(pairs)))
        prompts = vocabulary.texts([text for text, _ in chosen])
        examples[name] = [
            Example(vocabulary.asked(text, ids), target, name)
            for ids, (text, target) in zip(prompts, chosen, strict=True)
        ]
    return examples


def _merged(row: Row) -> bool:
    return row.source == "clinc150" and functions_for(row.source, row.intent) != (row.intent,)


def _ambiguous(row: Row) -> bool:
    return len(functions_for(row.source, row.intent)) > 1
