"""Chat templates in the manner of each model family, written for the tests: what they render, refuse and ignore."""

from __future__ import annotations

_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _ASK

HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Write <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}" + _ASK
)

LLAMA = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}"
    "{% endif %}<|start_header_id|>assistant<|end_header_id|>\n\n{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>{% else %}'
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if tools and m.role == 'user' and loop.last %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

_ALTERNATE = (
    "{% set ns = namespace(last='assistant') %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}{% if m.role == ns.last %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% set ns.last = m.role %}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}" + _ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS][{% for t in tools %}{{ t | tojson }}{% endfor %}][/AVAILABLE_TOOLS]"
    "{% endif %}[INST]{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{{ c.function | tojson }} "{{ c.id }}"{{ ", " if not loop.last }}{% endfor %}]</s>'
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

PHI = (
    "{% for m in messages %}{% if m.role == 'system' and 'tools' in m and m.tools is not none %}"
    "<|system|>{{ m.content }}<|tool|>{{ m.tools }}<|/tool|><|end|>{% else %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

ONE_TASK = "{% for m in messages if m.role == 'user' %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
"""As of our own assistants: nothing but the user's words."""
