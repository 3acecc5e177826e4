"""Images of vision models in the engine, beside what mtmd's own helper makes of them in a context of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from causeway_server.models.llama_cpp.protocol import Prompt, SoftRun, SoftTokens
from causeway_server.models.parts.process.messages import (
    ImagePixels,
    Projected,
    ProjectImage,
    Refusal,
    WorkerResult,
    WorkerSpec,
)

from .conftest import Rig
from .tiny_gguf import WORDS, write_tiny_gguf
from .tiny_mmproj import LANGUAGE, MARKS, Family, needs_mtmd, write_tiny_mmproj

pytestmark = [pytest.mark.engine, needs_mtmd]
MakeRig = Callable[..., Rig]
FAMILIES: tuple[Family, ...] = ("mlp", "idefics3", "qwen2vl_merger", "gemma3")
WIDTH, HEIGHT = 160, 100
BEFORE, AFTER = "tell me about the weather" * 3, " in the kitchen today"
LONG = {"max_tokens": 24, "ignore_eos": True}


class Vision:
    """A tiny vision model: its files, and an image as its encoder makes it."""

    def __init__(self, folder: Path, family: Family) -> None:
        from causeway_server.models.llama_cpp.native.mtmd import VisionEncoder

        self.model = write_tiny_gguf(
            folder / "model.gguf",
            architecture=LANGUAGE[family],
            marks=MARKS[family],
            window=512,
            words=(*WORDS, "\n\n"),  # a token that SmolVLM writes before an image
        )
        self.mmproj = write_tiny_mmproj(folder / "mmproj.gguf", family)
        self.family = family
        self._encoder = VisionEncoder(self.mmproj, self.model, threads=1)

    def image(self, seed: int = 1) -> SoftTokens:
        vectors, runs = self._encoder.encode(pixels(seed).tobytes(), WIDTH, HEIGHT)
        return SoftTokens(vectors.tobytes(), runs)

    def close(self) -> None:
        self._encoder.close()


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    made = Vision(tmp_path_factory.mktemp("vision"), request.param)
    yield made
    made.close()


def pixels(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def prompt(*pieces: str | SoftTokens) -> Prompt:
    soft = {one.marker: one for one in pieces if isinstance(one, SoftTokens)}
    return Prompt(text="".join(one if isinstance(one, str) else one.text for one in pieces), soft=tuple(soft.values()))


def said_by_mtmd(vision: Vision, pieces: list[str | int], tokens: int) -> str:
    """What llama.cpp itself answers, greedily: text, and images by their seeds."""
    import llama_cpp.llama_cpp as native
    from llama_cpp import mtmd_cpp as mtmd

    model = native.llama_model_load_from_file(str(vision.model).encode(), native.llama_model_default_params())
    context_params = native.llama_context_default_params()
    context_params.n_ctx, context_params.n_batch, context_params.n_ubatch = 512, 256, 256
    context_params.n_threads = context_params.n_threads_batch = 1
    context = native.llama_init_from_model(model, context_params)
    params = mtmd.mtmd_context_params_default()
    params.use_gpu = params.print_timings = params.warmup = False
    params.n_threads = 1
    encoder = mtmd.mtmd_init_from_file(str(vision.mmproj).encode(), model, params)
    raw = "".join(mtmd.mtmd_default_marker().decode() if isinstance(one, int) else one for one in pieces).encode()
    text = mtmd.mtmd_input_text(raw, len(raw), False, False)
    data = [pixels(one).tobytes() for one in pieces if isinstance(one, int)]
    bitmaps = [mtmd.mtmd_bitmap_init(WIDTH, HEIGHT, (ctypes.c_uint8 * len(one)).from_buffer_copy(one)) for one in data]
    chunks = mtmd.mtmd_input_chunks_init()
    array = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
    assert not mtmd.mtmd_tokenize(encoder, chunks, ctypes.byref(text), array, len(bitmaps))
    past = native.llama_pos(0)
    assert not mtmd.mtmd_helper_eval_chunks(encoder, context, chunks, 0, 0, 256, True, ctypes.byref(past))
    vocabulary, said = native.llama_model_get_vocab(model), b""
    size, buffer = native.llama_vocab_n_tokens(vocabulary), ctypes.create_string_buffer(64)
    batch = native.llama_batch_init(1, 0, 1)
    for step in range(tokens):
        token = int(np.ctypeslib.as_array(native.llama_get_logits_ith(context, -1), (size,)).argmax())
        length = native.llama_token_to_piece(vocabulary, token, buffer, 64, 0, False)
        said += buffer.raw[:length]
        batch.n_tokens, batch.token[0], batch.pos[0], batch.n_seq_id[0] = 1, token, past.value + step, 1
        batch.seq_id[0][0], batch.logits[0] = 0, 1
        assert not native.llama_decode(context, batch)
    native.llama_batch_free(batch)
    mtmd.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        mtmd.mtmd_bitmap_free(bitmap)
    mtmd.mtmd_free(encoder)
    native.llama_free(context)
    native.llama_model_free(model)
    return said.decode(errors="replace")


@pytest.fixture
def see(vision: Vision, make_rig: MakeRig) -> Callable[..., Rig]:
    return lambda **options: make_rig(model_path=str(vision.model), **options)


def test_answers_are_those_of_llama_cpp(vision: Vision, see: Callable[..., Rig]) -> None:
    """One image, and two with text between and without; in one batch of text, and in small ones."""
    one, other = vision.image(1), vision.image(2)
    rig, narrow = see(), see(batch_tokens=16)
    images = {1: one, 2: other}
    cases: list[list[str | int]] = [
        [BEFORE, 1, AFTER],
        [1, AFTER],
        [BEFORE, 1, " and", 2, AFTER],
        [BEFORE, 1, 1, 2, AFTER],
    ]
    for pieces in cases:
        expected = said_by_mtmd(vision, pieces, 24)
        seen = prompt(*(images[piece] if isinstance(piece, int) else piece for piece in pieces))
        assert rig.run(seen, **LONG).text == expected
        assert narrow.run(seen, **LONG).text == expected


def test_a_saved_prefix_ends_with_an_image_or_before_it(vision: Vision, see: Callable[..., Rig]) -> None:
    one, other = vision.image(1), vision.image(2)
    warm, cold = see(), see(prefix_cache_bytes=0)
    first = warm.run(prompt(BEFORE, one, AFTER), **LONG)
    again = warm.run(prompt(BEFORE, one, AFTER), **LONG)
    assert (again.text, again.end.cached_tokens) == (first.text, first.end.prompt_tokens - 1)
    for pieces in (
        (BEFORE, one, " please stop the music"),
        (BEFORE, other, AFTER),
        (BEFORE, one, AFTER, " hello", other, " what is it"),
    ):
        answer = warm.run(prompt(*pieces), **LONG)
        assert answer.end.cached_tokens > 0
        assert answer.text == cold.run(prompt(*pieces), **LONG).text


def test_images_of_several_prompts_beside_running_answers(vision: Vision, see: Callable[..., Rig]) -> None:
    prompts = [
        prompt("hello world"),
        prompt(BEFORE, vision.image(1), AFTER),
        prompt("hello", vision.image(2), " seven", vision.image(3), AFTER),
    ]
    one, together = see(), see(kv_tokens=384, context_tokens=256)
    alone = [one.run(each, **LONG).text for each in prompts]
    jobs = together.between_steps(lambda: [together.start(each, **LONG) for each in prompts])
    assert [together.answer(job).text for job in jobs] == alone
    assert together.engine.stats().kv_used == 0


def test_an_image_of_a_shape_that_the_model_cannot_take_is_the_client_s_error(vision: Vision) -> None:
    """SmolVLM's tiles of a line have no height. The process goes on."""
    from causeway_server.models.parts.encoders.mmproj import VisionModel

    worker = VisionModel(WorkerSpec("", options={"mmproj": str(vision.mmproj), "model": str(vision.model)}))

    def encode(width: int, height: int) -> WorkerResult:
        job = ProjectImage(ImagePixels(bytes(3 * width * height), width, height))
        return worker.run(job, link=None)  # type: ignore[arg-type]

    for width, height in ((1, 2048), (2048, 1)):
        if vision.family == "idefics3":
            with pytest.raises(Refusal, match=f"{width} × {height} pixels"):
                encode(width, height)
        else:
            assert isinstance(encode(width, height), Projected)
    assert isinstance(encode(8, 8), Projected)


def test_runs_that_are_not_of_this_model_are_refused(vision: Vision, see: Callable[..., Rig]) -> None:
    rig = see(batch_tokens=16)
    good = vision.image()
    run = good.runs[0]
    first = good.vectors[: 4 * 64 * run.vectors]
    for runs, words in (
        ((SoftRun(vectors=run.vectors + 1),), "its runs name"),
        ((SoftRun((), run.vectors, run.positions[4:] or bytes(12)),), "positions"),
        ((SoftRun((-7,), run.vectors, run.positions, run.span),), "token"),
    ):
        end = rig.run(prompt("hello", SoftTokens(first, runs), " hello")).end
        assert (end.error, words in end.detail) == ("invalid_value", True), end
    large = SoftTokens(first * 5, (SoftRun((), 5 * run.vectors, run.positions * 5, run.span, whole=True),))
    end = rig.run(prompt("hello", large, " hello")).end
    assert (end.error, "engine.batch_tokens" in end.detail) == ("unsupported_feature", True), end
    assert rig.run(prompt("hello", good, AFTER)).end.finish_reason
