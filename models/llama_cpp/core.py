"""A loaded model and its steps: build a batch, decode it, sample each sequence's next token, emit the text."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from causeway_server.router.errors import EngineUnavailable
from causeway_server.router.tool_calls.schema import tool_format

from ..chat.template import thinking_of
from .embedding import Embedder
from .native import bindings, resources
from .native.context import Context
from .native.resources import TunersBySize, allowed_cores, choose_threads
from .native.vocabulary import Vocabulary
from .native.weights import Adapters, Weights
from .prompts import PromptEncoder, SoftTokenIds
from .protocol import Emission, EngineOptions, ModelInfo
from .sampler import NO_TOKEN, GrammarCompiler, LogitsRow
from .scheduling.kv_cache import KVCache, PrefixCache
from .scheduling.prompt_prefixes import PromptPrefixes, PromptStore
from .scheduling.scheduler import Scheduler, Throughput
from .scheduling.sequence import Sequence
from .scheduling.speculation import MAX_DRAFTS, Draft, DraftPlanner, PromptLookup


class EngineCore:
    """The parts of one loaded model: weights, context, KV cache and scheduler. `steps`: llama_decode calls so far.

    Only the engine's thread calls `step` and `close`.
    """

    def __init__(self, options: EngineOptions, planner: DraftPlanner | None = None) -> None:
        """Load the model. `planner` chooses drafts; None: one that drafts if it pays. Raises EngineUnavailable."""
        self._weights = weights = Weights(Path(options.model_path), resources.choose_layers(options))
        with contextlib.ExitStack() as on_error:
            on_error.callback(weights.close)
            self.vocabulary = Vocabulary(weights.pointer, options.refuse_token or weights.refuse_token)
            self.adapters = Adapters(weights, options.adapters)
            plan = resources.plan_memory(
                options,
                weights.trained_context,
                weights.kv_bytes_per_token(options.kv_type),
                weights.size_bytes,
                resources.free_bytes(),
            )
            threads = choose_threads(options.threads)
            self._context = context = Context(
                weights,
                kv_tokens=plan.kv_tokens,
                sequences=options.sequences,
                batch_tokens=max(options.batch_tokens, options.sequences),
                outputs=options.sequences + MAX_DRAFTS,
                threads=threads,
                kv_type=options.kv_type,
            )
            on_error.callback(context.close)
            context.warm_up(0)
            on_error.pop_all()
        self.info = ModelInfo(
            context_tokens=plan.context_tokens,
            threads=threads,
            embedding_dimensions=weights.embedding_dimensions,
            tool_format=tool_format(weights.chat_template),
            thinking=thinking_of(weights.chat_template),
        )
        self.prompts = PromptEncoder(
            self.vocabulary,
            weights.chat_template,
            plan.context_tokens,
            SoftTokenIds(weights.input_dimensions, context.capacity, positions_have_parts=weights.positions_have_parts),
        )
        self.kv_cache = KVCache(context.memory, plan.kv_tokens, options.sequences)
        self.prefix_cache = (
            PrefixCache(context.pointer, self.kv_cache, plan.prefix_bytes, weights.window_tokens)
            if weights.shares_prefixes
            else None
        )
        self.throughput = Throughput(context.capacity)
        self._threads = TunersBySize(threads, None if options.threads else allowed_cores)
        # A draft's rejected cells can be removed only where a prefix could be shared.
        self.planner = (planner or DraftPlanner()) if options.prompt_lookup and weights.shares_prefixes else None
        self.prompt_store: PromptStore | None = None
        if options.prompt_folder and options.prompt_bytes and self.prefix_cache is not None and options.weights_sha256:
            identity = f"{options.weights_sha256} llama-cpp-python {bindings.VERSION} {options.kv_type}"
            self.prompt_store = PromptStore(
                Path(options.prompt_folder), options.prompt_bytes, identity, options.prompt_key
            )
        self.scheduler = Scheduler(
            context,
            self.kv_cache,
            PromptPrefixes(context.pointer, self.kv_cache, self.prefix_cache, self.prompt_store),
            self.throughput,
            options.sequences,
            self.planner,
        )
        self.grammars = GrammarCompiler(self.vocabulary)
        self.embedder = Embedder(weights, plan.context_tokens, threads)
        self.steps = 0
        self._texts = self.vocabulary.texts

    def close(self) -> None:
        """Free the native objects, in the order that llama.cpp requires."""
        if self.prompt_store is not None:
            self.prompt_store.flush()
        self.embedder.close()
        self._context.close()
        self._weights.close()

    def step(self, out: list[Emission]) -> None:
        """Advance each running sequence by a token or prefill chunk; append to `out`. Raises EngineUnavailable."""
        started = time.perf_counter()
        scheduler = self.scheduler
        turned = scheduler.take_turn(started)
        group = scheduler.current
        soft = scheduler.build_soft_batch() if group.prefilling else 0
        if soft and not self._decode_soft(soft, out):
            return
        rows, finishing = scheduler.build_batch()
        if not rows or not self._ensure_cells(rows, out):  # none: more soft tokens come first
            return
        drafted = scheduler.draft_rows
        decoding = len(group.decoding)
        prefilled = rows - decoding - drafted
        tuner = self._threads.tuner(rows, prompt=prefilled > 0)
        # Drafted steps differ too much to be part of a trial, and a trial's steps say nothing about what drafts cost.
        threads = tuner.best if drafted else tuner.threads
        usual = threads == tuner.best
        self._context.use_threads(threads)
        decode_started = time.perf_counter()
        code = self._context.decode(rows)
        decode_s = time.perf_counter() - decode_started
        self.steps += 1
        if code:
            self._handle_decode_failure(code, rows, out)
            return
        # The first step with another adapter takes longer.
        if not drafted and not turned:
            tuner.record(0 if prefilled else decoding, decode_s / rows, decode_s)
        if self.planner is not None and usual and not prefilled and not turned:
            self.planner.record(rows, decode_s)
        scheduler.commit_batch()
        sampled = self._sample_all(finishing, out)
        self.throughput.record(time.perf_counter() - started, sampled, decoding, prefilled + soft, scheduler.adapters)

    def _decode_soft(self, rows: int, out: list[Emission]) -> bool:
        """Decode a batch of soft tokens. Return False if it failed; the next batch is then invalid."""
        if not self._ensure_cells(rows, out):
            return False
        self._context.use_threads(self._threads.tuner(rows, prompt=True).best)
        code = self._context.decode_soft(rows, causal=not self.scheduler.soft_whole)
        self.steps += 1
        if code:
            self._handle_decode_failure(code, rows, out)
            return False
        self.scheduler.commit_prefill()
        return True

    def _sample_all(self, finishing: list[tuple[Sequence, int]], out: list[Emission]) -> int:
        """Sample the next tokens of every sequence with logits in this batch; return how many there are."""
        scheduler = self.scheduler
        decoding, last_tokens = scheduler.current.decoding, scheduler.current.last_tokens
        rows = len(decoding) + scheduler.draft_rows
        logits = self._context.rows(rows + len(finishing))
        if not len(logits):
            return 0
        best: list[int] = logits.argmax(axis=1).tolist()
        sampled = len(decoding) + len(finishing)
        finished: list[Sequence] = []
        for index, sequence in enumerate(decoding):
            token = self._next_token(sequence, best[index], logits[index], index, out)
            if (draft := scheduler.drafts.get(index)) is not None:
                accepted, token = self._verify(draft, sequence, token, best, logits, out)
                sampled += accepted
            last_tokens[index] = token
            if sequence.finished:
                finished.append(sequence)
        for row, (sequence, index) in enumerate(finishing, rows):
            if not sequence.generated and (echo := sequence.echo_prompt()) is not None:
                out.append(echo)
            if self.planner is not None and sequence.lookup is None and sequence.remaining > 1:
                sequence.lookup = PromptLookup(sequence.text_tokens)
            token = self._next_token(sequence, best[row], logits[row], index, out)
            if sequence.finished:
                finished.append(sequence)
            else:
                scheduler.start_decoding(sequence, token)
        for sequence in finished:
            scheduler.remove(sequence)
        return sampled

    def _verify(
        self,
        draft: Draft,
        sequence: Sequence,
        token: int,
        best: list[int],
        logits: NDArray[np.float32],
        out: list[Emission],
    ) -> tuple[int, int]:
        """Sample the token after each draft token that equals the token sampled at its position, first `token`.

        Returns the number of draft tokens that are part of the answer and cached, and the last token sampled.
        """
        accepted = 0
        for row, drafted in enumerate(draft.tokens, draft.row):
            if token != drafted or sequence.finished:
                break
            accepted += 1
            token = self._next_token(sequence, best[row], logits[row], row, out)
        self.scheduler.settle_draft(draft, accepted)
        return accepted, token

    def _next_token(self, sequence: Sequence, best: int, row: LogitsRow, index: int, out: list[Emission]) -> int:
        """Sample one sequence's token at batch index `index`, whose likeliest token is `best`."""
        token, sampler = best, sequence.sampler
        if sampler is not None:
            model_row = row.copy() if sequence.needs_logits and sampler.adjusts_logits else row
            token = sampler.sample(row, self._context.pointer, index)
            row = model_row
            if token != NO_TOKEN:
                sampler.accept(token)
        text = self._texts[token] if sequence.plain and token != NO_TOKEN else None
        if text is not None and len(sequence.generated) + 1 < sequence.max_tokens:
            out.append(sequence.accept_plain(token, text))
        elif (emission := sequence.accept(token, row)) is not None:
            out.append(emission)
        if sampler is not None and sampler.ended and not (sequence.finished or sequence.measures_end):
            out.append(sequence.end())
        if sequence.lookup is not None and not sequence.finished:
            sequence.lookup.append(token)
        return token

    def _ensure_cells(self, rows: int, out: list[Emission]) -> bool:
        """Ensure free KV cells for the batch, by preemption if need be; False if the batch is no longer valid."""
        if self.kv_cache.free >= rows:
            return True
        if not self.scheduler.preempt():
            self._fail_running(out)
        return False

    def _handle_decode_failure(self, code: int, rows: int, out: list[Emission]) -> None:
        """Handle an error of llama_decode: 1: too few cells are free; other codes: the context is broken."""
        self.scheduler.discard_batch()
        # Trust llama.cpp's capacity; otherwise the preempted sequence is readmitted at once.
        self.kv_cache.total = min(self.kv_cache.total, self.kv_cache.used + rows - 1)
        if code != 1:
            raise EngineUnavailable(f"Decoding failed: llama_decode returned {code}: {bindings.last_errors()}")
        if not self.scheduler.preempt():
            self._fail_running(out)

    def _fail_running(self, out: list[Emission]) -> None:
        """Fail the only running sequence, because it does not fit into the KV cache."""
        detail = f"no free cell among {self.kv_cache.total}"
        for sequence in self.scheduler.running_sequences:
            self.scheduler.remove(sequence)
            out.append(sequence.fail("engine_out_of_memory", detail))
