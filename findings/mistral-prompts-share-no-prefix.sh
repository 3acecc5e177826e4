#!/bin/sh
# mistral-common 1.13.1: the prompt of a conversation's next turn does not begin with the prompt of the turn before.
#
# Guess: a chat format puts the system prompt and the tools in front, so that a server's prefix cache keeps them and all
# earlier turns, and reads only what is new.
# Seen: in the formats v2 and v3 (Mistral 7B v0.2 and v0.3, Nemo) both stand before the last user message, wherever that
# is: a turn later they have moved, and nearly no token of the earlier prompt can be reused. v7 keeps the system prompt in
# front and moves the tools. The first format keeps everything in place, and leaves the tools out without an error.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cat > "$folder/turns.py" <<'PYTHON'
import os

from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, Tool
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

SYSTEM = SystemMessage(content="You keep the light of a harbour and answer in one sentence. " * 8)
TOOL = Tool(function=Function(name="lamp", description="switch", parameters={"type": "object", "properties": {}}))


def tokens(tokenizer, turns, tools):
    messages = [SYSTEM]
    for turn in range(turns):
        messages += [AssistantMessage(content=f"answer {turn}")] if turn else []
        messages.append(UserMessage(content=f"question {turn}"))
    request = ChatCompletionRequest(messages=messages, tools=[TOOL] if tools else None)
    return tokenizer.encode_chat_completion(request).tokens


for name in ("v1", "v2", "v3", "v7"):
    tokenizer = getattr(MistralTokenizer, name)()
    for tools in (False, True):
        first, next_one = tokens(tokenizer, 1, tools), tokens(tokenizer, 2, tools)
        shared = len(os.path.commonprefix([first, next_one]))
        left_out = tools and first == tokens(tokenizer, 1, tools=False)
        share = "all" if shared == len(first) else "most" if shared > len(first) / 2 else f"{shared} tokens"
        print(name, "tools:" if tools else "plain:", share, "kept", "(tools left out)" if left_out else "")
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mistral-common==1.13.1 sentencepiece==0.2.3
seen=$("$folder/venv/bin/python" "$folder/turns.py" | sed 's/ *$//')
printf '%s\n' "$seen"
[ "$seen" = 'v1 plain: all kept
v1 tools: all kept (tools left out)
v2 plain: 2 tokens kept
v2 tools: 1 tokens kept
v3 plain: 2 tokens kept
v3 tools: 1 tokens kept
v7 plain: all kept
v7 tools: most kept' ]
