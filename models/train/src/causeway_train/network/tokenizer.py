"""The tokenizer: byte-level BPE, and one token for each fixed piece of an answer.

`{"name":"alarm_set","arguments":{"time":"six am"}}` is `{"name":` `"alarm_set"` `,"arguments":{` `"time":"` six am
`"}}`: five fixed tokens and the value. The first one decides between an answer and a refusal (`<|refuse|>`), the second
one is the function. The pieces contain quotes, so they do not occur in user messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..function_calls.call import FunctionCall

PAD, END, USER, ASSISTANT, REFUSE = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|refuse|>"
REPEAT, NO_REPEAT = "<|again|>", "<|unused0|>"  # share one id: the first if prompts repeat the last message
SPECIAL = (PAD, END, USER, ASSISTANT, REFUSE, REPEAT, "<|unused1|>", "<|unused2|>")
MAX_REPEATED_CHARACTERS = 300  # longer messages are not repeated
OPEN, ARGUMENTS, NO_ARGUMENTS = '{"name":', ',"arguments":{', ',"arguments":{}}'
NEXT, CLOSE, LIST_NEXT, LIST_CLOSE_NEXT, LIST_CLOSE = '",', '"}}', '","', '"],', '"]}}'
RARE = 3  # a piece that starts fewer words than this gets no variant with a leading space
FIXED = (OPEN, ARGUMENTS, NO_ARGUMENTS, NEXT, CLOSE, LIST_NEXT, LIST_CLOSE_NEXT, LIST_CLOSE)


class AssistantTokenizer:
    """Converts texts and calls to token ids, and back."""

    def __init__(self, bpe: Tokenizer) -> None:
        self.bpe = bpe
        self.size = bpe.get_vocab_size()
        self._ids: dict[str, int] = bpe.get_vocab()
        self.end, self.user, self.assistant = self._ids[END], self._ids[USER], self._ids[ASSISTANT]
        self.refuse, self.pad = self._ids[REFUSE], self._ids[PAD]
        self.repeat_token = self._ids.get(REPEAT)  # None: prompts are not repeated

    @classmethod
    def train(
        cls, texts: Iterable[str], functions: Sequence[str], arguments: Sequence[str], merges: int, repeat: bool = True
    ) -> AssistantTokenizer:
        """Train BPE with about `merges` merges; round the size up to a multiple of 64 (Q4_0 blocks, bf16 tiles).

        Words are learnt without their leading space; then each piece that starts words gets a variant with the space,
        merged last. A word is therefore split identically with and without a space, and copying it into a JSON string
        maps token to token.

        Args:
            repeat: whether prompts repeat the last message.
        """
        texts = list(texts)
        special = SPECIAL if repeat else tuple(NO_REPEAT if name == REPEAT else name for name in SPECIAL)
        bare = _bare_words(texts, merges, special)
        vocabulary, rules = _with_spaces(bare, texts)
        pieces = fixed_pieces(functions, arguments)
        for index in range(-(len(vocabulary) + len(pieces)) % 64):
            vocabulary[f"<|padding{index}|>"] = len(vocabulary)
        bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=rules))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        bpe.decoder = decoders.ByteLevel()
        controls = [*special, *(name for name in vocabulary if name.startswith("<|padding"))]
        bpe.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in controls])
        bpe.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
        return cls(bpe)

    @classmethod
    def load(cls, path: Path) -> AssistantTokenizer:
        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        self.bpe.save(str(path))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.bpe.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Return ids and their character ranges; a leading space belongs to its token."""
        return self.bpe.encode_batch(list(texts), add_special_tokens=False)

    def encode_value(self, text: str) -> list[int]:
        """Return the ids of an argument's value as it stands in an answer (JSON-escaped)."""
        return self.encode_batch([_escaped(text)])[0]

    def prompt(self, text_ids: Sequence[int], repeat: bool = False) -> list[int]:
        """Return the ids of one user turn, as the chat template renders it.

        Args:
            repeat: repeat the message, if this tokenizer has the token for it. A causal network then knows the whole
                message when it reads a word the second time (Springer et al. 2024, arXiv 2402.15449).
        """
        repetition = [self.repeat_token, *text_ids] if repeat and self.repeat_token is not None else []
        return [self.user, *text_ids, *repetition, self.assistant]

    def last_prompt(self, text: str, text_ids: Sequence[int]) -> list[int]:
        """Return the prompt of the last message: repeated unless `text` is long."""
        return self.prompt(text_ids, repeat=len(text) <= MAX_REPEATED_CHARACTERS)

    def earlier_prompt(self, prompt: Sequence[int]) -> list[int]:
        """Return the same prompt as an earlier turn, which is never repeated."""
        ids = list(prompt)
        return [*ids[: ids.index(self.repeat_token)], self.assistant] if self.repeat_token in ids else ids

    def encode_call(self, call: FunctionCall, refuse: bool = False) -> list[int]:
        """Return the ids of an answer, end token included; `refuse` puts `<|refuse|>` first."""
        ids = [self.refuse] if refuse else []
        ids += [self._ids[OPEN], self._ids[f'"{call.name}"']]
        if not call.arguments:
            return [*ids, self._ids[NO_ARGUMENTS], self.end]
        ids.append(self._ids[ARGUMENTS])
        last = len(call.arguments) - 1
        for index, (name, value) in enumerate(call.arguments.items()):
            is_list = isinstance(value, list)
            ids.append(self._ids[f'"{name}":["' if is_list else f'"{name}":"'])
            for position, item in enumerate(value if isinstance(value, list) else [value]):
                ids += [self._ids[LIST_NEXT]] if position else []
                ids += self.encode_value(item)
            closing = (LIST_CLOSE if is_list else CLOSE) if index == last else (LIST_CLOSE_NEXT if is_list else NEXT)
            ids.append(self._ids[closing])
        return [*ids, self.end]

    def missing(self, functions: Sequence[str], arguments: Sequence[str]) -> list[str]:
        """Return those functions and arguments that have no token, so that no call with them can be encoded."""
        unknown = [name for name in functions if f'"{name}"' not in self._ids]
        return unknown + [name for name in arguments if f'"{name}":"' not in self._ids]

    def function_token(self, function: str) -> int:
        """Return the token that names a function in a call."""
        return self._ids[f'"{function}"']

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.bpe.decode(list(ids), skip_special_tokens=True))


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
    """Return the vocabulary with `Ġx` beside each x that starts words, and the merges with those of the `Ġx` ranked
    last.
    """
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
    """Return the pieces of an answer that are one token each."""
    names = [f'"{name}"' for name in functions]
    singles = [f'"{name}":"' for name in arguments]
    lists = [f'"{name}":["' for name in arguments]
    return [*FIXED, *names, *singles, *lists]


def _escaped(value: str) -> str:
    return msgspec.json.encode(value).decode()[1:-1]
