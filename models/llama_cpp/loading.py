"""From options to everything that an engine needs, or a clear reason why not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from . import sizing
from .cells import Cells
from .context import Context
from .embedding import Embedder
from .pace import Pace
from .prefixes import Prefixes
from .prompts import Prompts
from .protocol import EngineOptions, ModelInfo
from .sampling import Candidates
from .schedule import Schedule
from .threads import choose_threads
from .vocabulary import Vocabulary
from .weights import Weights


@dataclass(frozen=True)
class Loaded:
    """The parts of one engine. `close` frees what is native, in the order that llama.cpp wants."""

    info: ModelInfo
    weights: Weights
    vocabulary: Vocabulary
    prompts: Prompts
    context: Context
    cells: Cells
    pace: Pace
    schedule: Schedule
    candidates: Candidates
    embedder: Embedder

    def close(self) -> None:
        self.embedder.close()
        self.context.close()
        self.weights.close()


def load(options: EngineOptions) -> Loaded:
    """Raises EngineUnavailable saying what to do: no file, not a model, too large for this machine."""
    weights = Weights(Path(options.model_path), options.gpu_layers)
    with contextlib.ExitStack() as undo:
        undo.callback(weights.close)
        vocabulary = Vocabulary(weights.pointer, options.refuse_token or weights.refuse_token)
        room = sizing.plan_room(options, weights.context, weights.token_bytes, weights.bytes, sizing.free_bytes())
        threads = choose_threads(options.threads)
        context = Context(
            weights,
            cells=room.total,
            sequences=options.sequences,
            batch_tokens=max(options.batch_tokens, options.sequences),
            outputs=options.sequences,
            threads=threads,
        )
        undo.callback(context.close)
        context.warm_up(0)
        undo.pop_all()
    cells = Cells(context.memory, room.total, options.sequences)
    prefixes = Prefixes(context.pointer, context.memory, cells, room.prefix_bytes) if weights.shares_prefixes else None
    pace = Pace(context.capacity)
    return Loaded(
        info=_describe(weights, vocabulary, room.context, threads, options.sequences),
        weights=weights,
        vocabulary=vocabulary,
        prompts=Prompts(vocabulary, weights.template, room.context),
        context=context,
        cells=cells,
        pace=pace,
        schedule=Schedule(context, cells, prefixes, pace, options.sequences),
        candidates=Candidates(vocabulary),
        embedder=Embedder(weights, room.context, threads),
    )


def _describe(weights: Weights, vocabulary: Vocabulary, context: int, threads: int, sequences: int) -> ModelInfo:
    return ModelInfo(
        name=weights.name,
        architecture=weights.architecture,
        quantisation=weights.quantisation,
        parameters=weights.parameters,
        context_tokens=context,
        vocabulary=vocabulary.size,
        bytes=weights.bytes,
        threads=threads,
        sequences=sequences,
        embedding_dimensions=weights.dimensions,
        has_chat_template=bool(weights.template),
    )
