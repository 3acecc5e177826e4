"""Audio, images and files at the gateway, read by encoders in a real Triton; the model repeats its prompt."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits, TenantsConfig, TierPrice
from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.background import run_worker
from causeway_server.cloud_pool.cli.main import main
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.parts.request_parts import FORGETS, TenantMemory
from causeway_server.cloud_pool.serving.guard import GuardConfig
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.tiers.config import PartsConfig, TierConfig
from causeway_server.models.parts.graph.branch import PartMemory, ReadPart
from causeway_server.models.parts.installed import is_installed
from causeway_server.models.parts.process.messages import Found
from causeway_server.router.types import Fact
from tests.cloud_pool.dispatch.replica import Replica
from tests.cloud_pool.jobs.redis_server import RedisServer
from tests.cloud_pool.serving.test_guard import ACTIONS, rules
from tests.cloud_pool.test_no_prompt_in_logs import serving
from tests.cloud_pool.upstreams.test_triton_client import Reply, piece
from tests.e2e.sessions.gateway import ECHO
from tests.edge_node.guard.test_doors import SECRET
from tests.edge_node.parts.test_fusion import audio, image, text
from tests.models.parts.files import HOSTILE_CLIPS, HOSTILE_IMAGES, HOSTILE_TEXTS, png, tone, wav
from tests.models.parts.test_files import file
from tests.waiting import until

from ..conftest import PATIENCE_S

pytestmark = [pytest.mark.triton, pytest.mark.slow]

PNG, WAV = png(8, 8), wav(tone(0.2))
ALL = (text("What is this?"), image(PNG), audio(WAV), file("Rent is due."))
EVERY_KIND = "audio=ok,file=ok,image=ok"


@pytest.fixture(scope="module")
def replica(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    found = Replica("a", tmp_path_factory.mktemp("replica"), encoders=True)
    try:
        found.process.ready()
        yield found
    finally:
        found.process.stop()


class Gateway:
    """A gateway in this process. `answer` is what the model was asked, if the request got there."""

    def __init__(self, app: App, http: aiohttp.ClientSession, folder: Path) -> None:
        self.app = app
        self.http = http
        self._audit = folder / "audit.jsonl"

    async def ask(self, *parts: Mapping[str, object], tags: str = "", **more: object) -> Answer:
        body = {"model": "large", "messages": [{"role": "user", "content": list(parts)}], **more}
        headers = {"Authorization": "Bearer one", "x-causeway-tags": tags}
        with anyio.fail_after(PATIENCE_S):
            async with self.http.post("/v1/chat/completions", json=body, headers=headers) as reply:
                return Answer(reply.status, dict(reply.headers), await reply.read())

    async def hear(self, data: bytes, **fields: str) -> Answer:
        form = aiohttp.FormData({"model": "speech"} | fields)
        form.add_field("file", data, filename="a.wav", content_type="audio/wav")
        with anyio.fail_after(PATIENCE_S):
            async with self.http.post(
                "/v1/audio/transcriptions", data=form, headers={"Authorization": "Bearer one"}
            ) as reply:
                return Answer(reply.status, dict(reply.headers), await reply.read())

    @property
    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._audit.read_text().splitlines()]


class Answer:
    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def text(self) -> str:
        return str(json.loads(self.body)["choices"][0]["message"]["content"])

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["error"]["message"])

    @property
    def parts(self) -> tuple[str | None, str | None]:
        return self.headers.get("x-causeway-modalities"), self.headers.get("x-causeway-degraded")


@asynccontextmanager
async def running(
    folder: Path,
    replica: Replica | str | None,
    parts: PartsConfig | None = None,
    jobs: JobsConfig | None = None,
    tenants: TenantsConfig | None = None,
    regions: Mapping[str, str] = {},
    guard: GuardConfig | None = None,
) -> AsyncIterator[Gateway]:
    """`replica`: itself or its address; None: a gateway without encoders, whose Triton is away. `jobs`: a worker runs
    them. `regions`: those of tiers; the gateway is in `eu`.
    """
    (folder / "echo.jinja").write_text(ECHO)
    (folder / "tokens").write_text("kiosk-1 one\n")
    address = replica.address if isinstance(replica, Replica) else replica or "127.0.0.1:1"
    template = str(folder / "echo.jinja")
    tiers = [TierConfig("large", model="obedient", template_file=template, context_tokens=4096, triton=address)]
    if replica is not None:
        tiers += [
            TierConfig("speech", triton=address, can=("audio",), concurrency=2),
            TierConfig("speech-2", model="speech", triton=address, can=("audio",)),
            TierConfig("images", triton=address, can=("image",), concurrency=2),
            TierConfig("files", triton=address, can=("file",)),
        ]
    config = Config(
        server=ServerConfig(port=0, token_file=str(folder / "tokens")),
        tiers=tuple(msgspec.structs.replace(tier, region=regions.get(tier.name, "")) for tier in tiers),
        identity=IdentityConfig(region="eu"),
        audit_file=str(folder / "audit.jsonl"),
        parts=parts or PartsConfig(audio_timeout_s=PATIENCE_S, image_timeout_s=PATIENCE_S),
        jobs=jobs or JobsConfig(),
        tenants=tenants or TenantsConfig(),
        guard=guard or GuardConfig(),
    )
    stop = asyncio.Event()
    async with anyio.create_task_group() as tasks:
        if jobs is not None:
            tasks.start_soon(run_worker, msgspec.structs.replace(config, audit_file=""), stop)
        app = build(config, tasks)
        await app.start()
        try:
            async with aiohttp.ClientSession(app.url.removesuffix("/v1")) as http:
                yield Gateway(app, http, folder)
        finally:
            stop.set()
            await app.stop()
    await app.close()


async def test_the_model_gets_what_encoders_found_whole_and_streamed(replica: Replica, tmp_path: Path) -> None:
    async with running(tmp_path, replica) as gateway:
        answer = await gateway.ask(*ALL)
        assert (answer.status, answer.parts) == (200, (EVERY_KIND, None)), answer.body
        assert answer.text.startswith("What is this?\n[An image; text in it, with confidence 0.88:\nTOTAL 42.00\n]")
        assert "[An audio clip; words in it, with confidence 0.88:\nplease open|the door\n]" in answer.text
        assert answer.text.endswith("[A file; text in it:\nRent is due.\n]")
        streamed = await gateway.ask(*ALL, stream=True)
        assert (streamed.status, streamed.parts) == (200, (EVERY_KIND, None))
        assert b"TOTAL 42.00" in streamed.body
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        alone = await gateway.ask(audio(WAV))
        assert (alone.text, alone.parts) == ("please open|the door", ("audio=ok", None))
        n = await gateway.ask(*ALL, n=2)
        assert [choice["message"]["content"] for choice in json.loads(n.body)["choices"]] == [answer.text] * 2
        typed = await gateway.ask(text("hello"))
        assert (typed.text, typed.parts) == ("hello", (None, None))
    records = gateway.audit
    assert [record["parts"] for record in records] == [EVERY_KIND, EVERY_KIND, "audio=ok", EVERY_KIND, ""]
    assert "TOTAL" not in (tmp_path / "audit.jsonl").read_text()


async def test_an_encoder_outside_the_regions_gets_no_part(replica: Replica, tmp_path: Path) -> None:
    """The answer goes on without the part; a transcript that only such a tier could make is refused."""
    regions = {"large": "eu", "images": "eu", "speech": "us"}
    async with running(tmp_path, replica, regions=regions) as gateway:
        answer = await gateway.ask(*ALL, tags="in-region:eu")
        assert answer.parts == ("audio=failed,file=failed,image=ok", "true")
        assert "TOTAL 42.00" in answer.text
        assert "please open" not in answer.text
        assert "Rent is due" not in answer.text
        assert (await gateway.ask(*ALL)).parts == (EVERY_KIND, None)
    bound = TenantsConfig(default=TenantLimits(regions=("eu",)))
    async with running(tmp_path, replica, regions=regions, tenants=bound) as gateway:
        heard = await gateway.hear(WAV)
        assert heard.status == 503
        assert "bound to eu, but the tier speech (tiers.region) is in us" in heard.message


@pytest.mark.parametrize("action", ACTIONS)
async def test_the_guard_reads_what_encoders_found(replica: Replica, tmp_path: Path, action: str) -> None:
    """The text of a file, beside a transcript and an image: the model repeats its prompt."""
    async with running(tmp_path, replica, guard=rules(action, "pii.count > 0")) as gateway:
        answer = await gateway.ask(audio(WAV), image(PNG), file(SECRET))
        assert answer.status == (400 if action == "refuse" else 200), answer.body
        assert action == "refuse" or SECRET in answer.text
        clean = await gateway.ask(audio(WAV), image(PNG))
        assert "please open|the door" in clean.text
    outcomes = [(record["outcome"], record["guard"]) for record in gateway.audit]
    assert outcomes[0] == (("guard_refused", "") if action == "refuse" else ("ok", f"personal={action}"))
    assert outcomes[1] == ("ok", "")


async def test_a_part_is_read_once_and_a_private_one_is_never_remembered(replica: Replica, tmp_path: Path) -> None:
    async with running(tmp_path, replica) as gateway:
        before = replica.gauge("requests", "images")

        async def read(**more: str) -> float:
            assert (await gateway.ask(text("?"), image(png(9, 9)), **more)).parts == ("image=ok", None)
            return replica.gauge("requests", "images") - before

        assert [await read(tags="private"), await read(tags="private")] == [1, 2]
        assert [await read(), await read()] == [3, 3]


async def test_audio_costs_its_seconds_once_and_a_budget_that_a_clip_could_exceed_refuses_it(
    replica: Replica, tmp_path: Path
) -> None:
    """A clip reserves two minutes, the longest one that encoders read; what is remembered costs nothing."""
    prices = tuple(TierPrice(tier=name, audio_second=0.001, per_request=0.01) for name in ("speech", "large"))
    tenants = TenantsConfig(TenantLimits(usd_per_day=0.2), prices=prices)
    async with running(tmp_path, replica, tenants=tenants) as gateway:
        heard = await gateway.hear(WAV), await gateway.ask(audio(WAV)), await gateway.ask(audio(wav(tone(0.3))))
        for answer in heard:
            assert answer.status == 200, answer.body
        assert (await gateway.hear(b"no audio")).status == 400
        await until(lambda: len(gateway.audit) == 4)
        costs = [(record["tier"], record["audio_ms"], record["pico_usd"]) for record in gateway.audit]
        assert costs == [
            ("speech", 200, 10**10 + 200 * 10**6),
            ("large", 0, 10**10),
            ("large", 300, 10**10 + 300 * 10**6),
            ("speech", 0, 0),
        ]
        refused = await gateway.ask(audio(WAV), audio(WAV))
        assert (refused.status, "may cost up to 0.25 USD" in refused.message) == (400, True)


def test_what_is_remembered_belongs_to_a_tenant_and_is_forgotten() -> None:
    now = [0.0]
    shared = PartMemory(2, 60.0, lambda: now[0])
    north, south = TenantMemory(shared, "north"), TenantMemory(shared, "south")
    read = ReadPart(Found(Fact("x", 1.0)))
    north.keep("image", "a", read)
    assert (north.find("image", "a"), south.find("image", "a")) == (read, None)
    assert north.find("audio", "a") is None
    assert TenantMemory(shared, "north", "another-tier").find("image", "a") is None
    south.keep("image", "b", read)
    south.keep("image", "c", read)
    assert (north.find("image", "a"), south.find("image", "c")) == (None, read)
    now[0] = 60.0
    assert south.find("image", "c") is None
    FORGETS.keep("image", "a", read)
    assert FORGETS.find("image", "a") is None


async def test_a_part_that_is_late_is_left_out_and_said(replica: Replica, tmp_path: Path) -> None:
    async with running(tmp_path, replica, PartsConfig(audio_timeout_s=PATIENCE_S, image_timeout_s=0.5)) as gateway:
        answer = await gateway.ask(text("What?"), image(png(5, 8)), audio(WAV))
        assert (answer.status, answer.parts) == (200, ("audio=ok,image=timeout", "true"))
        assert "[An image that could not be read.]" in answer.text
        assert "please open" in answer.text
        nothing = await gateway.ask(image(png(5, 9)))
        assert (nothing.status, "could be read in time" in nothing.message) == (503, True)
    assert [record["outcome"] for record in gateway.audit] == ["ok", "encoder_failed"]


async def test_an_encoder_that_dies_costs_its_part_and_the_next_one_is_read(replica: Replica, tmp_path: Path) -> None:
    async with running(tmp_path, replica) as gateway:
        answer = await gateway.ask(*ALL[:1], image(png(3, 8)))
        assert (answer.status, answer.parts) == (200, ("image=failed", "true"))
        assert (await gateway.ask(*ALL)).parts == (EVERY_KIND, None)


async def test_a_killed_stub_costs_its_part_until_the_model_is_loaded_again(replica: Replica, tmp_path: Path) -> None:
    async with running(tmp_path, replica) as gateway:
        replica.stub("images").kill()
        seen: set[str | None] = set()
        with anyio.fail_after(PATIENCE_S):
            while "image=ok" not in seen:
                answer = await gateway.ask(text("?"), image(png(10, 10)), tags="private")
                assert answer.status in (
                    200,
                    503,
                )  # a killed stub may take Triton with it: its launcher starts it again
                seen |= {answer.parts[0]} if answer.status == 200 else set()
                await asyncio.sleep(0.05)
        assert seen <= {"image=failed", "image=ok"}


async def test_the_work_of_a_client_that_leaves_ends(replica: Replica, tmp_path: Path) -> None:
    async with running(tmp_path, replica) as gateway:
        asking = asyncio.ensure_future(gateway.ask(image(png(5, 10)), text("?")))
        await until(lambda: replica.gauge("running", "images") == 1)
        asking.cancel()
        await until(lambda: replica.gauge("running", "images") == 0)
        assert (await gateway.ask(*ALL)).parts == (EVERY_KIND, None)


async def test_hostile_files_are_refused_by_name_and_the_next_good_one_is_read(
    replica: Replica, tmp_path: Path
) -> None:
    cases: list[tuple[str, dict[str, object]]] = [
        ("image_url.url", image(HOSTILE_IMAGES["declares 4 gigapixels"])),
        ("image_url.url", image(HOSTILE_IMAGES["a text that unpacks to 64 MB"])),
        ("image_url.url", image(HOSTILE_IMAGES["SVG"])),
        ("input_audio.data", audio(HOSTILE_CLIPS["a million empty chunks"])),
        ("input_audio.data", audio(HOSTILE_CLIPS["65,535 channels"])),
        ("file.file_data", file(HOSTILE_TEXTS["program"])),
        ("file.file_data", file(HOSTILE_TEXTS["too long"])),
        ("file.file_id", {"type": "file", "file": {"file_id": "file-1"}}),
        ("image_url.url", {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}),
    ]
    async with running(tmp_path, replica) as gateway:
        for place, part in cases:
            answer = await gateway.ask(text("?"), part)
            assert (answer.status, f"`messages[0].content[1].{place}`" in answer.message) == (400, True), answer.body
        silence = await gateway.ask(audio(wav(np.zeros(3200))))
        assert (silence.status, "contains no speech" in silence.message) == (400, True)
        assert (await gateway.ask(*ALL)).parts == (EVERY_KIND, None)


async def test_the_models_are_those_that_a_request_may_name_each_with_where(replica: Replica, tmp_path: Path) -> None:
    """As OpenAI lists whisper-1; no request names what reads images or files."""
    async with (
        running(tmp_path, replica) as gateway,
        AsyncOpenAI(base_url=gateway.app.url, api_key="one", max_retries=0) as client,
    ):
        listed = {model.id: model.to_dict() async for model in client.models.list()}
        hears = {"endpoints": ["/v1/audio/transcriptions"]}
        speaks = {
            "endpoints": ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/realtime", "/v1/completions"]
        }
        assert {name: model["causeway"] for name, model in listed.items()} == {
            "large": speaks,
            "speech": hears,
            "speech-2": hears,
            "whisper-1": hears,
        }
        assert (await client.models.retrieve("whisper-1")).to_dict() == listed["whisper-1"]
        with pytest.raises(NotFoundError, match="only encodes parts of requests"):
            await client.models.retrieve("images")
        with pytest.raises(NotFoundError, match="Known: large, speech, speech-2, whisper-1\\."):
            await client.models.retrieve("nothing")
        with pytest.raises(BadRequestError, match="is for images, not for chats"):
            await client.chat.completions.create(model="images", messages=[{"role": "user", "content": "hello"}])


async def test_transcriptions_by_the_official_client(replica: Replica, tmp_path: Path) -> None:
    async with running(tmp_path, replica) as gateway:
        async with AsyncOpenAI(base_url=gateway.app.url, api_key="one") as client:
            audio = client.audio.transcriptions
            words = (await audio.create(model="whisper-1", file=("a.wav", WAV), prompt="a house")).text
            assert words == "please open|the door"
            verbose = await audio.create(model="speech", file=("a.wav", WAV), response_format="verbose_json")
            assert (verbose.language, verbose.duration, len(verbose.segments or ())) == ("en", 0.2, 1)
            timed = await audio.create(
                model="speech", file=("a.wav", WAV), response_format="verbose_json", timestamp_granularities=["word"]
            )
            assert (timed.segments, " ".join(word.word for word in timed.words or ())) == (None, words)
            assert await audio.create(model="speech", file=("a.wav", WAV), response_format="text") == f"{words}\n"
            cue = f"00:00:00,000 --> 00:00:00,200\n{words}\n\n"
            assert await audio.create(model="speech", file=("a.wav", WAV), response_format="srt") == f"1\n{cue}"
            stream = await audio.create(model="speech", file=("b.wav", wav(tone(0.3))), stream=True)
            events = [event async for event in stream]
        deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
        assert deltas == ["please open", " the door"]
        assert events[-1].type == "transcript.text.done"
        before = replica.gauge("requests", "speech")
        assert [(await gateway.hear(WAV, model=tier)).status for tier in ("speech", "speech-2")] == [200, 200]
        assert replica.gauge("requests", "speech") - before == 1  # remembered, but not for another tier
        silence = await gateway.hear(wav(np.zeros(3200)), stream="true")
        assert (silence.status, b'"text":""' in silence.body) == (200, True)
        for data, fields, status, said in (
            (HOSTILE_CLIPS["rate 0"], {}, 400, "`file`: "),
            (WAV, {"model": "large"}, 400, "for chats and completions, not for audio clips"),
            (WAV, {"model": "absent"}, 404, "absent"),
            (WAV, {"language": "xx"}, 400, "`language`: the language 'xx' is not known"),
            (WAV, {"sample": "1"}, 400, "`sample`"),
        ):
            answer = await gateway.hear(data, **fields)
            assert (answer.status, said in answer.message) == (status, True), answer.body
        chat = await gateway.ask(text("?"), model="speech")
        assert (chat.status, "for audio clips, not for chats" in chat.message) == (400, True)
    assert {record["route"] for record in gateway.audit} == {"transcription", "chat"}


async def test_uploaded_files_are_read_as_their_bytes_are(replica: Replica, tmp_path: Path) -> None:
    """In a chat, a response, a job that a worker runs, and by reference to what was read before."""
    redis = RedisServer(tmp_path)
    try:
        async with running(tmp_path, replica, jobs=JobsConfig(redis=redis.url)) as gateway:
            async with AsyncOpenAI(base_url=gateway.app.url, api_key="one") as client:
                files = {
                    name: (await client.files.create(file=(name, data), purpose="user_data")).id
                    for name, data in (("a.txt", b"Rent is due."), ("a.png", PNG), ("a.wav", WAV))
                }
                named: tuple[dict[str, object], ...] = (
                    text("What is this?"),
                    {"type": "image_url", "image_url": {"url": files["a.png"]}},
                    {"type": "input_audio", "input_audio": {"data": files["a.wav"], "format": "wav"}},
                    {"type": "file", "file": {"file_id": files["a.txt"]}},
                )
                before = replica.gauge("requests", "images")
                answer = await gateway.ask(*named)
                assert (answer.status, answer.parts) == (200, (EVERY_KIND, None)), answer.body
                inline = await gateway.ask(
                    text("What is this?"), image(PNG), audio(WAV), file("Rent is due.", filename="a.txt")
                )
                assert inline.text == answer.text
                assert replica.gauge("requests", "images") - before <= 1  # the second time it is known
                content = [{"type": "input_text", "text": "?"}, {"type": "input_image", "file_id": files["a.png"]}]
                items = [{"type": "message", "role": "user", "content": content}]
                seen = await client.responses.create(model="large", input=items)  # type: ignore[arg-type]
                assert "TOTAL 42.00" in seen.output_text
                body = {"model": "large", "messages": [{"role": "user", "content": [named[3]]}]}
                headers = {"Authorization": "Bearer one"}
                async with gateway.http.post("/v1/jobs", json=body, headers=headers) as reply:
                    assert reply.status == 202, await reply.read()
                    job = (await reply.json())["id"]
                for name in files.values():
                    await client.files.delete(name)
                gone = await gateway.ask(*named)
                assert (gone.status, "messages[0].content[1].image_url.url" in gone.message) == (404, True)
            async with gateway.http.get(f"/v1/jobs/{job}/events", headers=headers) as events:
                assert b"event: succeeded" in await events.read()
            async with gateway.http.get(f"/v1/jobs/{job}", headers=headers) as reply:
                found = await reply.json()
            assert "Rent is due." in found["result"]["choices"][0]["message"]["content"]
    finally:
        redis.kill()
    async with running(tmp_path, replica) as gateway:  # it has no Redis, so no files
        assert "does not read uploaded files" in (await gateway.ask(*named)).message
    assert "file-" not in (tmp_path / "audit.jsonl").read_text()


async def test_a_gateway_without_encoders_names_the_part_and_what_to_configure(tmp_path: Path) -> None:
    async with running(tmp_path, None) as gateway:
        answer = await gateway.ask(*ALL)
        assert (answer.status, "`messages[0].content[1]`" in answer.message) == (400, True)
        assert "can: [image]" in answer.message
        deaf = await gateway.hear(WAV)
        assert (deaf.status, "can: [audio]" in deaf.message) == (400, True)
    assert [record["outcome"] for record in gateway.audit] == ["unsupported_feature"]


@pytest.mark.parametrize("words", ["It is a cat.", ""], ids=["a language model", "no answer"])
async def test_a_tier_that_is_not_our_encoder_costs_its_part(
    tmp_path: Path, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Operators read in the log what answers there."""

    async def script(request: Any, _context: object) -> AsyncIterator[Reply]:
        yield piece("an answer" if request.model_name == "obedient" else words, "stop", final=True)

    async with serving(script) as address, running(tmp_path, address) as gateway:
        answer = await gateway.ask(text("What?"), image(PNG))
        assert (answer.status, answer.text, answer.parts) == (200, "an answer", ("image=failed", "true"))
        nothing = await gateway.ask(image(PNG))
        assert nothing.status == 503
    assert [record["outcome"] for record in gateway.audit] == ["ok", "encoder_failed"]
    assert ("does not answer as an encoder of Causeway does" if words else "ended without an answer") in caplog.text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "speech", "--encoder-python", "python"), "causeway-models pull speech"),
        (("--model", "files", "--encoder-python", "/bin/false"), "/bin/false lacks packages that files needs"),
        (("--model", "files", "--encoder-python", "/nonexistent"), "/nonexistent: No such file or directory"),
        (("--model", "hearing=speech"), "causeway-router[voice]"),
        (("--model", "nope"), "; the encoders are speech, images, files."),
        (("--model", "large=nope"), "No model is named 'nope'. The language models are assistant, assistant-large"),
        (("--model", "assistant", "--model", "assistant=assistant-large"), "Two models have the same name 'assistant'"),
        (("--model", "edge-quality"), "No model is named 'edge-quality'"),  # it computes a signal, and answers nothing
    ],
)
def test_a_model_that_is_not_here_is_named_with_how_to_get_it(
    triton_environment: Path, flags: tuple[str, ...], words: str
) -> None:
    if words == "causeway-router[voice]" and is_installed("audio"):
        pytest.skip("it is here")
    ran = CliRunner().invoke(main, ["triton", "--environment", str(triton_environment), *flags])
    assert (ran.exit_code, words in ran.output) == (2, True), ran.output


def test_a_gateway_without_encoders_imports_none_of_this() -> None:
    of_parts = tuple(
        f"causeway_server.{name}" for name in ("cloud_pool.parts.r", "cloud_pool.parts.e", "models.parts.graph")
    )
    check = "import causeway_server.cloud_pool.app, sys; "
    check += f"sys.exit(any(name.startswith({of_parts}) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
