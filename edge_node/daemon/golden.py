"""Ask a model of a bundle its golden prompts, past policy and cache, at temperature 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from models.catalog.artifact import ArtifactError, find_artifact
from models.llama_cpp.protocol import SoftTokens
from router.bundle.manifest import Blob, BundleModel, GoldenPrompt
from router.bundle.refusals import GoldenAnswerDiffers, ModelUnusable
from router.errors import CausewayError
from router.types import Message, Request, Sampling, Target, TextPart

from ..agent.store import picture_file
from ..backends.backend import Backend, BackendRequest
from ..config.schema import ModalitiesConfig

_GOLDEN_S = 180.0  # of one prompt, loading the model included
_GOLDEN_TOKENS = 256
_PROBE, _PROBE_TOKENS = "hello", 1  # whether an adapter can be used shows with its first request

See = Callable[[Blob], Awaitable[SoftTokens]]
"""Turns a picture of a golden prompt into soft tokens of its model. Raises ModelUnusable."""


async def check_golden(engine: Backend, model: BundleModel, see: See, tries: int = 1) -> None:
    """Ask a model and each of its adapters directly.

    Args:
        see: For prompts with a picture.
        tries: For each prompt; an engine that also decodes other requests may break a near tie in another way.

    Raises:
        GoldenAnswerDiffers: One of them answers something else.
        ModelUnusable: One of them does not answer, or a picture cannot be read.
    """
    await _check_answers(engine, Target(model.name, "edge", model.name), model.golden, see, tries)
    for adapter in model.adapters:
        target = Target(f"{model.name}+{adapter.name}", "edge", model.name, adapter=adapter.name)
        if not adapter.golden:
            await _answer(engine, target, _PROBE, _PROBE_TOKENS)
        await _check_answers(engine, target, adapter.golden, see, tries)


async def _check_answers(
    engine: Backend, target: Target, prompts: Sequence[GoldenPrompt], see: See, tries: int
) -> None:
    for golden in prompts:
        soft = None if golden.picture is None else await see(golden.picture)
        answers: list[str] = []
        while golden.answer not in answers:
            if len(answers) == tries:
                raise GoldenAnswerDiffers(
                    f"{target.name} answers {golden.prompt[:80]!r} with {answers[-1][:80]!r}, "
                    f"not {golden.answer[:80]!r}"
                )
            answers.append(await golden_answer(engine, target, golden.prompt, soft))


async def golden_answer(engine: Backend, target: Target, prompt: str, soft: SoftTokens | None = None) -> str:
    """Return what a model, with its adapter if the target has one, answers to a golden prompt. Raises ModelUnusable.

    Args:
        soft: Of the picture after the prompt.
    """
    return await _answer(engine, target, prompt, _GOLDEN_TOKENS, soft)


async def _answer(engine: Backend, target: Target, prompt: str, max_tokens: int, soft: SoftTokens | None = None) -> str:
    content = prompt if soft is None else (TextPart(prompt), TextPart(soft.text))
    request = Request(
        kind="chat",
        model=target.name,
        messages=(Message("user", content),),
        sampling=Sampling(temperature=0.0),
        max_tokens=max_tokens,
    )
    deadline = asyncio.get_running_loop().time() + _GOLDEN_S
    pictures = () if soft is None else (soft,)
    call = BackendRequest(id="golden", request=request, target=target, deadline=deadline, soft=pictures)
    try:
        return "".join([chunk.text async for chunk in engine.generate(call) if chunk.index == 0])
    except CausewayError as error:
        raise ModelUnusable(f"{target.name}: {error.message}") from error


@asynccontextmanager
async def golden_pictures(
    model: BundleModel, model_dirs: Sequence[Path], config: ModalitiesConfig
) -> AsyncIterator[See]:
    """Yield the function that reads the pictures of a model's golden prompts.

    It has processes of its own, because requests may still use the projector of the bundle before. A model without such
    prompts starts none.

    Raises:
        ModelUnusable: The model's projector cannot be used here.
    """
    if not model.pictures:
        yield _no_picture
        return
    if not config.enabled:
        raise ModelUnusable(f"{model.name}: a golden prompt has a picture, and this box reads none: modalities.enabled")
    # Imported only where a bundle needs it.
    from models.catalog.projector import find_projector
    from models.modalities.installed import DECODER
    from models.modalities.process.messages import PartLimits, Refusal, WorkerSpec
    from models.modalities.process.parent import WorkerFailed, WorkerProcess

    from ..serving.part_encoders import Projectors

    limits = PartLimits(config.max_audio_s, config.max_pixels, config.max_text_bytes)
    decoder = WorkerProcess(WorkerSpec(DECODER, limits, memory_bytes=config.decoder_memory_bytes))
    try:
        folder = find_artifact(model.name, model_dirs).folder
        found = await asyncio.to_thread(find_projector, model.name, tuple(model_dirs))
    except ArtifactError as error:
        raise ModelUnusable(f"{model.name}: {error}") from error
    projectors = Projectors(lambda _: found, decoder, remembered=1, timeout_s=_GOLDEN_S)
    projectors.kinds(model.name)

    async def see(picture: Blob) -> SoftTokens:
        deadline = asyncio.get_running_loop().time() + _GOLDEN_S
        try:
            content = await asyncio.to_thread((folder / picture_file(picture)).read_bytes)
            return await projectors.run(model.name, content, picture.sha256, deadline)
        except (OSError, Refusal, WorkerFailed) as error:
            raise ModelUnusable(
                f"{model.name}: the picture {picture.sha256[:12]} of a golden prompt cannot be read: {error}"
            ) from error

    try:
        yield see
    finally:
        await projectors.close()
        await decoder.close()


async def _no_picture(picture: Blob) -> SoftTokens:
    raise ModelUnusable(f"no projector reads the picture {picture.sha256[:12]}")
