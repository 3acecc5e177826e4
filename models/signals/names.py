"""Names and addresses in texts, by a token classification model of the owner's: a folder as `optimum-cli export onnx`
writes it, with `model.onnx`, `tokenizer.json` and `config.json`, whose `id2label` has the labels.

No such model ships. Labels of persons (`PER`, `PERSON`, `GIVENNAME`) are names, those of streets and places (`LOC`,
`STREET`, `CITY`) addresses; others are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import numpy as np

from causeway_server.router.errors import ConfigError
from causeway_server.router.guard.classes import Found

if TYPE_CHECKING:
    from causeway_server.router.guard.facts import TextModel

_WINDOW, _STRIDE = 384, 64  # tokens of a window, and those that two windows share
_LABELS: Final[tuple[tuple[Literal["name", "address"], tuple[str, ...]], ...]] = (
    ("name", ("PER", "PERSON", "NAME", "GIVENNAME", "SURNAME", "FIRSTNAME", "LASTNAME")),
    ("address", ("LOC", "LOCATION", "ADDRESS", "STREET", "STREETNAME", "BUILDINGNUM", "CITY", "ZIPCODE")),
)


class _Config(msgspec.Struct):
    id2label: dict[str, str]


def load_names_model(folder: str) -> TextModel | None:
    """Load the model of a folder; None for "". Raises ConfigError."""
    if not folder:
        return None
    where = f"guard.names_model: {folder}"
    try:
        return NamesModel(Path(folder))
    except ImportError as error:
        message = f"{error.name} is not installed: pip install onnxruntime tokenizers."
        raise ConfigError(message, where=where) from error
    except Exception as error:  # `tokenizers` and onnxruntime raise classes of their own
        raise ConfigError(f"The model cannot be loaded: {error}", where=where) from error


class NamesModel:
    """A loaded model, for any thread. Raises ImportError (`tokenizers`, `onnxruntime`), or Exception for a file."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        from .onnx_graph import OnnxGraph

        labels = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config).id2label
        self._kinds = [_kind(labels.get(str(number), "")) for number in range(len(labels))]
        if not any(self._kinds):
            raise ValueError("No label of `id2label` in config.json stands for a name or an address.")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(_WINDOW, stride=_STRIDE)
        self._tokenizer.no_padding()
        self._graph = OnnxGraph(folder / "model.onnx")

    def find(self, text: str) -> Sequence[Found]:
        """Return the names and addresses in a text; neighbouring tokens of one class are one value."""
        whole = self._tokenizer.encode(text)
        found: list[Found] = []
        for window in (whole, *whole.overflowing):
            ids = np.array([window.ids], dtype=np.int64)
            known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            logits = self._graph({name: known[name] for name in self._graph.inputs})
            for start, end, number in self._tokens(window.offsets, logits[0].argmax(-1)):
                kind = self._kinds[number]
                if kind is None:
                    continue
                last = found[-1] if found else None
                if last is not None and last.kind == kind and start <= last.end + 1 and end > last.start:
                    found[-1] = Found(last.start, max(last.end, end), kind)
                else:
                    found.append(Found(start, end, kind))
        return found

    @staticmethod
    def _tokens(offsets: Sequence[tuple[int, int]], labels: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        for (start, end), number in zip(offsets, labels, strict=True):
            if start < end:  # special tokens have no place in the text
                yield start, end, int(number)


def _kind(label: str) -> Literal["name", "address"] | None:
    name = label.upper().removeprefix("B-").removeprefix("I-")
    return next((kind for kind, labels in _LABELS if name in labels), None)
