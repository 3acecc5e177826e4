"""From options to everything that an engine needs, or a clear reason why not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from .embedding import Embedder
from .native import memory
from .native.context import Context
from .native.threads import choose_threads
from .native.vocabulary import Vocabulary
from .native.weights import Weights
from .prompts import PromptEncoder
from .protocol import EngineOptions, ModelInfo
from .sampling.sampler import TokenDataArray
from .scheduling.kv_cache import KVCache
from .scheduling.prefix_cache import PrefixCache
from .scheduling.scheduler import Scheduler
from .scheduling.throughput import Throughput


@dataclass(frozen=True)
class EngineParts:
    """The parts of one engine. `close` frees what is native, in the order that llama.cpp wants."""

    info: ModelInfo
    weights: Weights
    vocabulary: Vocabulary
    prompts: PromptEncoder
    context: Context
    cells: KVCache
    pace: Throughput
    schedule: Scheduler
    candidates: TokenDataArray
    embedder: Embedder

    def close(self) -> None:
        self.embedder.close()
        self.context.close()
        self.weights.close()


def load(options: EngineOptions) -> EngineParts:
    """Raises EngineUnavailable saying what to do: no file, not a model, too large for this machine."""
    weights = Weights(Path(options.model_path), options.gpu_layers)
    with contextlib.ExitStack() as undo:
        undo.callback(weights.close)
        vocabulary = Vocabulary(weights.pointer, options.refuse_token or weights.refuse_token)
        room = memory.plan_memory(options, weights.context, weights.token_bytes, weights.bytes, memory.free_bytes())
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
    cells = KVCache(context.memory, room.total, options.sequences)
    prefixes = (
        PrefixCache(context.pointer, context.memory, cells, room.prefix_bytes) if weights.shares_prefixes else None
    )
    pace = Throughput(context.capacity)
    return EngineParts(
        info=_describe(weights, vocabulary, room.context, threads, options.sequences),
        weights=weights,
        vocabulary=vocabulary,
        prompts=PromptEncoder(vocabulary, weights.template, room.context),
        context=context,
        cells=cells,
        pace=pace,
        schedule=Scheduler(context, cells, prefixes, pace, options.sequences),
        candidates=TokenDataArray(vocabulary),
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
