"""llama.cpp's library of vision models, mtmd: an image and an `mmproj` file → soft tokens.

mtmd.h (github.com/ggml-org/llama.cpp, tools/mtmd) is the reference. Only pixels go into it: its own decoders of files
are never called.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from pathlib import Path

import llama_cpp.llama_cpp as native
import numpy as np
from llama_cpp import mtmd_cpp as mtmd
from numpy.typing import NDArray

from causeway_server.router.errors import EngineUnavailable, InvalidRequest

from ..protocol import SoftRun
from . import bindings
from .weights import MANY_PART_POSITIONS

log = logging.getLogger(__name__)
_MAX_TOKENS = 1024  # of an image, for models that take any size (M-RoPE): a CPU reads more in minutes


class VisionEncoder:
    """An mmproj file in memory, with the language model that it belongs to. Only the header of that model is used."""

    def __init__(self, mmproj: Path, model: Path, threads: int) -> None:
        """Load both files. Raises EngineUnavailable: llama.cpp cannot read them, or they do not fit each other."""
        mtmd.mtmd_log_set(bindings.on_log, ctypes.c_void_p(0))
        with contextlib.ExitStack() as on_error:
            # For its header: the weights are never read here, and repacked ones would be a copy. The engine shares the
            # pages.
            self._model = bindings.load_model(model, n_gpu_layers=0, use_extra_bufts=False)
            on_error.callback(native.llama_model_free, self._model)
            params = mtmd.mtmd_context_params_default()
            params.use_gpu = params.print_timings = params.warmup = False
            params.n_threads = threads
            if native.llama_model_rope_type(self._model) in MANY_PART_POSITIONS:
                # Others have sizes or tiles that they were trained with, which a bound of one's own turns off.
                params.image_max_tokens = _MAX_TOKENS
            self._context = mtmd.mtmd_init_from_file(str(mmproj).encode(), self._model, params)
            if not self._context:
                raise EngineUnavailable(
                    f"{mmproj}: the projector does not fit the model {model.name}: {bindings.last_errors()}"
                )
            on_error.callback(mtmd.mtmd_free, self._context)
            if not mtmd.mtmd_support_vision(self._context):
                raise EngineUnavailable(f"{mmproj}: the model does not take images.")
            on_error.pop_all()
        self._path = mmproj
        self._dimensions = int(native.llama_model_n_embd_inp(self._model))

    def encode(self, pixels: bytes, width: int, height: int) -> tuple[NDArray[np.float32], tuple[SoftRun, ...]]:
        """Return an image's vectors, [vectors, dimensions], and their positions. `pixels`: uint8 RGB [height, width,
        3].

        Raises InvalidRequest for an image of this shape, EngineUnavailable if mtmd cannot encode it.
        """
        vectors: list[NDArray[np.float32]] = []
        runs: list[SoftRun] = []
        tokens: tuple[int, ...] = ()
        with self._chunks(pixels, width, height) as chunks:
            for index in range(mtmd.mtmd_input_chunks_size(chunks)):
                chunk = mtmd.mtmd_input_chunks_get(chunks, index)
                if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    count = ctypes.c_size_t()
                    found = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                    tokens += tuple(found[: count.value])
                else:
                    vectors.append(self._vectors(chunk))
                    runs.append(self._run(chunk, tokens))
                    tokens = ()
        if tokens:
            runs.append(SoftRun(tokens=tokens))
        if any(token < 0 for run in runs for token in run.tokens):
            raise EngineUnavailable(f"{self._path}: the model lacks the tokens that enclose an image of this kind.")
        if not vectors:
            raise EngineUnavailable(f"{self._path}: mtmd produced no embedding for the test image.")
        return np.concatenate(vectors), tuple(runs)

    def close(self) -> None:
        mtmd.mtmd_free(self._context)
        native.llama_model_free(self._model)

    @contextlib.contextmanager
    def _chunks(self, pixels: bytes, width: int, height: int):  # type: ignore[no-untyped-def]
        bitmap = mtmd.mtmd_bitmap_init(width, height, (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels))
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            part = mtmd.mtmd_input_part(text=None, bitmap=bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            if mtmd.mtmd_tokenize_from_parts(self._context, chunks, parts, 1, False):
                log.info(
                    "The mtmd library refused an image of %d × %d pixels: %s", width, height, bindings.last_errors()
                )
                raise InvalidRequest(f"This model does not accept images of {width} × {height} pixels.")
            yield chunks
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _vectors(self, chunk: int) -> NDArray[np.float32]:
        if code := mtmd.mtmd_encode_chunk(self._context, chunk):
            raise EngineUnavailable(f"{self._path}: mtmd cannot encode the image ({code}): {bindings.last_errors()}")
        count = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        found = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._context), (count, self._dimensions))
        if not np.isfinite(found).all():
            raise EngineUnavailable(f"{self._path}: the projector produces vectors with values that are not finite.")
        return np.array(found, np.float32)  # the context keeps the original for the next chunk

    def _run(self, chunk: int, tokens: tuple[int, ...]) -> SoftRun:
        count = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        whole = bool(mtmd.mtmd_decode_use_non_causal(self._context, chunk))
        if not mtmd.mtmd_decode_use_mrope(self._context):
            return SoftRun(tokens, count, whole=whole)
        image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        places = [mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, index) for index in range(count)]
        if any(place.z for place in places):
            raise EngineUnavailable(
                f"{self._path}: the projector gives an image positions of four parts, which this version does not "
                "support."
            )
        rows = np.array([[place.t, place.y, place.x] for place in places], np.int32)
        return SoftRun(tokens, count, rows.T.tobytes(), int(mtmd.mtmd_input_chunk_get_n_pos(chunk)), whole)
