"""LangGraph with langchain-openai (chats and responses) and langchain-anthropic."""

from __future__ import annotations

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent
from place import ASK, KEY, LOOP, MODEL, REPORT, TEXT, URL, Report, Tools, flow, run_all


def models(name: str = MODEL) -> dict[str, BaseChatModel]:
    openai_settings = {"model": name, "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
    return {
        "chats": ChatOpenAI(**openai_settings),
        "responses": ChatOpenAI(**openai_settings, use_responses_api=True),
        "messages": ChatAnthropic(model=name, base_url=URL, api_key=KEY, max_retries=0),
    }


def text_of(message: object) -> str:
    """Return the text of a message, whose content is a text or a list of blocks."""
    return str(getattr(message, "text", ""))


def register(kind: str, model: BaseChatModel) -> None:
    @flow(f"{kind}: a text, whole and streamed")
    async def _() -> None:
        assert text_of(await model.ainvoke("hi")) == TEXT
        assert "".join([text_of(piece) async for piece in model.astream("hi")]) == TEXT

    @flow(f"{kind}: tools in four turns, and two questions from a checkpoint")
    async def _() -> None:
        tools = Tools()
        functions = [tools.get_weather, tools.add, tools.keep]
        asked = create_react_agent(model, functions, checkpointer=InMemorySaver())
        thread = {"configurable": {"thread_id": "one"}}
        for _ in range(2):
            found = await asked.ainvoke({"messages": [("user", ASK)]}, thread)
            tools.check(text_of(found["messages"][-1]))

    @flow(f"{kind}: tools in four turns, streamed")
    async def _() -> None:
        tools = Tools()
        asked = create_react_agent(model, [tools.get_weather, tools.add, tools.keep])
        text = ""
        async for piece, _about in asked.astream({"messages": [("user", ASK)]}, stream_mode="messages"):
            if isinstance(piece, AIMessageChunk):
                text += text_of(piece)
        assert text.endswith(LOOP), text
        tools.check(LOOP)

    @flow(f"{kind}: an object by schema and by tool")
    async def _() -> None:
        for method in ("json_schema", "function_calling"):
            assert await model.with_structured_output(Report, method=method).ainvoke("hi") == REPORT

    @flow(f"{kind}: an unknown model is the client's error")
    async def _() -> None:
        try:
            await models("none")[kind].ainvoke("hi")
        except (openai.NotFoundError, anthropic.NotFoundError):
            return
        raise AssertionError("no error")


for kind, model in models().items():
    register(kind, model)
run_all()
