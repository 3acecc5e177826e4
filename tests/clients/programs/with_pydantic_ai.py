"""pydantic-ai over chats, responses and messages."""

from __future__ import annotations

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from place import ASK, KEY, MODEL, REPORT, TEXT, URL, Report, Tools, flow, run_all
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0))
ANTHROPIC = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0))

ABLE = {"supports_json_schema_output": True}  # otherwise it goes by the names of Anthropic's models


def models(name: str = MODEL) -> dict[str, Model]:
    return {
        "chats": OpenAIChatModel(name, provider=OPENAI),
        "responses": OpenAIResponsesModel(name, provider=OPENAI),
        "messages": AnthropicModel(name, provider=ANTHROPIC, profile=ABLE),
    }


def agent(model: Model, output: object = str, tools: Tools | None = None) -> Agent:
    functions = [tools.get_weather, tools.add, tools.keep] if tools else []
    return Agent(model, output_type=output, retries=0, tools=functions)


def register(kind: str, model: Model) -> None:
    @flow(f"{kind}: a text, whole and streamed")
    async def _() -> None:
        assert (await agent(model).run("hi")).output == TEXT
        async with agent(model).run_stream("hi") as stream:
            assert await stream.get_output() == TEXT

    @flow(f"{kind}: tools in four turns, then the user goes on")
    async def _() -> None:
        tools = Tools()
        asked = agent(model, tools=tools)
        found = await asked.run(ASK)
        tools.check(found.output)
        again = await asked.run(ASK, message_history=found.all_messages())
        tools.check(again.output)

    @flow(f"{kind}: tools in four turns, streamed")
    async def _() -> None:
        tools = Tools()
        text = ""
        async with agent(model, tools=tools).run_stream_events(ASK) as events:
            async for event in events:
                if event.event_kind == "agent_run_result":
                    text = event.result.output
        tools.check(text)

    @flow(f"{kind}: output by schema and by tool, whole and streamed")
    async def _() -> None:
        for output in (NativeOutput(Report), ToolOutput(Report)):
            asked = agent(model, output)
            assert (await asked.run("hi")).output == REPORT
            async with asked.run_stream("hi") as stream:
                assert await stream.get_output() == REPORT

    @flow(f"{kind}: an unknown model is a 404")
    async def _() -> None:
        status = 0
        try:
            await agent(models("none")[kind]).run("hi")
        except ModelHTTPError as error:
            status = error.status_code
        assert status == 404


for kind, model in models().items():
    register(kind, model)
run_all()
