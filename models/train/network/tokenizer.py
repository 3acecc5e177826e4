"""The tokenizer: byte-level BPE, and one token for each fixed piece of an answer.

`{"name":"alarm_set","arguments":{"time":"six am"}}` is
`{"name":` `"alarm_set"` `,"arguments":{` `"time":"` six am `"}}`: five fixed tokens, the first of which says whether
the model
answers at all (its rival is `<|refuse|>`) and the second which function it is. The pieces carry quotes, so they do
not occur in
what people say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from ...function_calls.call import FunctionCall

PAD, END, USER, ASSISTANT, REFUSE = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|refuse|>"
AGAIN, ONCE = "<|again|>", "<|unused0|>"  # one place in the vocabulary: the first where the utterance is read twice
SPECIAL = (PAD, END, USER, ASSISTANT, REFUSE, AGAIN, "<|unused1|>", "<|unused2|>")
TWICE_CHARACTERS = 300  # a longer message is read once
OPEN, ARGUMENTS, NO_ARGUMENTS = '{"name":', ',"arguments":{', ',"arguments":{}}'
NEXT, CLOSE, LIST_NEXT, LIST_CLOSE_NEXT, LIST_CLOSE = '",', '"}}', '","', '"],', '"]}}'
RARE = 3  # a piece that starts fewer words than this gets no twin with a space
FIXED = (OPEN, ARGUMENTS, NO_ARGUMENTS, NEXT, CLOSE, LIST_NEXT, LIST_CLOSE_NEXT, LIST_CLOSE)


class AssistantTokenizer:
    """Text and calls to token ids, and back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.get_vocab_size()
        self._ids: dict[str, int] = tokenizer.get_vocab()
        # Without the answer's fixed pieces: what a user writes never turns into one while training.
        self.end, self.user, self.assistant = self._ids[END], self._ids[USER], self._ids[ASSISTANT]
        self.refuse, self.pad = self._ids[REFUSE], self._ids[PAD]
        self.again = self._ids.get(AGAIN)

    @classmethod
    def train(
        cls, texts: Iterable[str], functions: Sequence[str], arguments: Sequence[str], merges: int, twice: bool = True
    ) -> AssistantTokenizer:
        """Learn about `merges` merges; the size is rounded up to a multiple of 64 (Q4_0 blocks, bf16 matrix tiles).

        Words are learnt without the space before them; then each piece that starts words gets a twin with the space,
        merged
        last. So a word is cut at the same places with and without a space, and copying it into a JSON string maps
        piece to piece.
        """
        texts = list(texts)
        special = SPECIAL if twice else tuple(ONCE if name == AGAIN else name for name in SPECIAL)
        bare = _bare_words(texts, merges, special)
        vocabulary, rules = _with_spaces(bare, texts)
        pieces = fixed_pieces(functions, arguments)
        for index in range(-(len(vocabulary) + len(pieces)) % 64):
            vocabulary[f"<|padding{index}|>"] = len(vocabulary)
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=rules))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        controls = [*special, *(name for name in vocabulary if name.startswith("<|padding"))]
        tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in controls])
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> AssistantTokenizer:
        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        self.tokenizer.save(str(path))

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encodings(self, texts: Sequence[str]) -> list[Encoding]:
        """Ids and the characters they stand for; a piece's space belongs to it."""
        return self.tokenizer.encode_batch(list(texts), add_special_tokens=False)

    def value(self, text: str) -> list[int]:
        """An argument's value as it stands in an answer."""
        return self.texts([_escaped(text)])[0]

    def prompt(self, text_ids: Sequence[int], twice: bool = False) -> list[int]:
        """One user turn as the chat template renders it.

        `twice`: the utterance stands there again, if this vocabulary has a token for it. A causal network then
        knows the whole sentence when it reads a word the second time (Springer et al. 2024, arXiv 2402.15449).
        """
        again = [self.again, *text_ids] if twice and self.again is not None else []
        return [self.user, *text_ids, *again, self.assistant]

    def once(self, prompt: Sequence[int]) -> list[int]:
        """The same prompt as an earlier turn, which is read once."""
        ids = list(prompt)
        return [*ids[: ids.index(self.again)], self.assistant] if self.again in ids else ids

    def asked(self, text: str, text_ids: Sequence[int]) -> list[int]:
        """The prompt of the last message `text`: read twice unless it is long."""
        return self.prompt(text_ids, twice=len(text) <= TWICE_CHARACTERS)

    def call(self, call: FunctionCall, refuse: bool = False) -> list[int]:
        """The answer's ids up to and with the end token; a refusal leads with `<|refuse|>`."""
        ids = [self.refuse] if refuse else []
        ids += [self._ids[OPEN], self._ids[f'"{call.name}"']]
        if not call.arguments:
            return [*ids, self._ids[NO_ARGUMENTS], self.end]
        ids.append(self._ids[ARGUMENTS])
        last = len(call.arguments) - 1
        for index, (name, value) in enumerate(call.arguments.items()):
            several = isinstance(value, list)
            ids.append(self._ids[f'"{name}":["' if several else f'"{name}":"'])
            for place, one in enumerate(value if isinstance(value, list) else [value]):
                ids += [self._ids[LIST_NEXT]] if place else []
                ids += self.value(one)
            stop = (LIST_CLOSE if several else CLOSE) if index == last else (LIST_CLOSE_NEXT if several else NEXT)
            ids.append(self._ids[stop])
        return [*ids, self.end]

    def name(self, function: str) -> int:
        """The token that names a function in a call."""
        return self._ids[f'"{function}"']

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _bare_words(texts: Sequence[str], merges: int, special: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 256 + merges,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _with_spaces(bare: Tokenizer, texts: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary with `Ġx` beside each x that starts words, and the merges that make them, last in rank."""
    model = msgspec.json.decode(bare.to_str())["model"]
    vocabulary: dict[str, int] = dict(sorted(model["vocab"].items(), key=lambda item: int(item[1])))
    rules = [(str(left), str(right)) for left, right in model["merges"]]
    starts: Counter[str] = Counter()
    for text in texts:
        words = text.split()
        starts.update(
            encoding.tokens[0] for encoding in bare.encode_batch(words, add_special_tokens=False) if encoding.tokens
        )
    for piece, count in starts.most_common():
        if count >= RARE and f"Ġ{piece}" not in vocabulary:
            vocabulary[f"Ġ{piece}"] = len(vocabulary)
            rules.append(("Ġ", piece))
    return vocabulary, rules


def fixed_pieces(functions: Sequence[str], arguments: Sequence[str]) -> list[str]:
    names = [f'"{name}"' for name in functions]
    singles = [f'"{name}":"' for name in arguments]
    lists = [f'"{name}":["' for name in arguments]
    return [*FIXED, *names, *singles, *lists]


def _escaped(value: str) -> str:
    return msgspec.json.encode(value).decode()[1:-1]
