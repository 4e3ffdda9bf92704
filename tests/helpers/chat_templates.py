"""Chat templates in the formats of six families, written for these tests, and tokenizer folders with them."""
# ruff: noqa: E501, RUF001 (templates, and texts of other languages)

import json
import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizer_files import tokenizer_json

SPECIAL = [
    *("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    *("<|return|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
ADDED += ["<arg_key>", "</arg_key>", "<arg_value>"]  # tensor parallelism divides the vocabulary, which has 320 tokens

CHATML = """{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}
{{ message.content }}<|im_end|>
{%- endif %}

{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'You are a careful assistant.' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}
{%- if tools %}
    {{- '\\nTools:\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- generation %}
        {%- if message.tool_calls %}
            {%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{% endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
        {%- else %}
            {{- message.content | trim + '<|eot_id|>' }}
        {%- endif %}
        {%- endgeneration %}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{% set ns.query = messages | length - loop.index %}{% break %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts, content = message.reasoning_content or '', message.content or '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.query and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

OLMO3 = """{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful function-calling assistant. ' }}
    {{- '<functions>' + tools | tojson + '</functions>' if tools else 'You have no functions.' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.content %}{{- message.content }}{% endif %}
        {%- if message.tool_calls %}
            {{- '<function_calls>' }}
            {%- for call in message.tool_calls %}
                {{- call.function.name + '(' }}
                {%- for name, value in call.function.arguments.items() %}
                    {{- name + '=' + value | tojson + ('' if loop.last else ', ') }}
                {%- endfor %}
                {{- ')' }}
            {%- endfor %}
            {{- '</function_calls>' }}
        {%- endif %}
        {{- eos_token if loop.last else '<|im_end|>' }}
        {%- endgeneration %}
        {{- '' if loop.last else '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + ('environment' if message.role == 'tool' else message.role) + '\\n' }}
        {{- message.content }}
        {%- if message.role == 'system' and tools %}{{- '<functions>' + tools | tojson + '</functions>' }}{% endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

GPT_OSS = """{%- macro parameters(tool) %}
    {%- for name, value in tool.function.parameters.properties | items %}{{- name + ': ' + value.type + ',\\n' }}{% endfor %}
{%- endmacro %}
{{- '<|start|>system<|message|>You are a large language model.\\nReasoning: ' + (effort | default('medium')) + '<|end|>' }}
{%- if messages[0].role == 'system' or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role == 'system' %}{{- '# Instructions\\n\\n' + messages[0].content }}{% endif %}
    {%- if tools %}
        {{- '\\n\\n# Tools\\n\\nnamespace functions {\\n' }}
        {%- for tool in tools %}{{- 'type ' + tool.function.name + ' = (_: {\\n' + parameters(tool) + '}) => any;\\n' }}{% endfor %}
        {{- '}' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(tool=none) %}
{%- for message in messages %}
    {%- set later = namespace(answer=false) %}
    {%- for other in messages[loop.index:] %}{% if other.role == 'user' %}{% set later.answer = true %}{% endif %}{% endfor %}
    {%- if message.role == 'assistant' %}
        {{- '<|start|>assistant' }}
        {%- generation %}
        {%- if message.thinking and not later.answer %}
            {{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {%- set ns.tool = call.name %}
            {{- ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
        {%- else %}
            {%- set ns.tool = none %}
            {{- '<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}
        {%- endif %}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if ns.tool is none %}{{- raise_exception('a tool message without a call') }}{% endif %}
        {{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

GLM45 = """[gMASK]<sop>
{%- if tools %}
<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'system' %}<|system|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- generation %}
{%- if loop.index0 > ns.last and m.reasoning_content %}
{{ '\\n<think>' + m.reasoning_content.strip() + '</think>' }}
{%- else %}
{{ '\\n<think></think>' }}
{%- endif %}
{%- if m.content and m.content.strip() %}
{{ '\\n' + m.content.strip() }}
{%- endif %}
{%- for call in m.tool_calls or [] %}
{{ '\\n<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}
{{ '\\n<arg_key>' ~ name ~ '</arg_key>\\n<arg_value>' ~ (value if value is string else value | tojson) ~ '</arg_value>' }}
{%- endfor %}
{{- '\\n</tool_call>' }}
{%- endfor %}
{%- endgeneration %}
{%- elif m.role == 'tool' %}<|observation|>
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

TEMPLATES = {
    "ChatML": CHATML,
    "Llama 3": LLAMA3,
    "Qwen3": QWEN3,
    "OLMo 3": OLMO3,
    "gpt-oss": GPT_OSS,
    "GLM-4.5": GLM45,
}


def unmarked(template: str) -> str:
    """The same template, which does not mark what the assistant says."""
    return re.sub(
        r"\{%(-?) (end)?generation %\}", lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} %}}", template
    )


def chat_folder(folder: Path, template: str | None, **config: Any) -> Path:
    """A tokenizer folder with this template."""
    folder.mkdir(parents=True, exist_ok=True)
    path = tokenizer_json(folder / "tokenizer.json", SPECIAL)
    library = tokenizers.Tokenizer.from_file(str(path))
    library.no_truncation()
    library.add_tokens(ADDED)
    library.save(str(path))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|endoftext|>",
    }
    chat = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, **chat, **config}))
    return folder


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Das Wetter – 天気",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(city: str, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


PLAIN: list[dict[str, Any]] = [
    {"messages": [said("user", "What is 2 + 2?"), said("assistant", "It is 4.")]},
    {
        "messages": [
            *(said("system", "Be brief."), said("user", "Hi"), said("assistant", "Hello, what is it?")),
            *(said("user", "Nothing"), said("assistant", "Fine.\n"), said("user", "Bye"), said("assistant", "Bye")),
        ]
    },
    {
        "messages": [
            said("user", "Größe? 天気は🌦\ufe0f? e\u0301 שלום \t\n"),
            said("assistant", "👩\u200d👧 naïve — 東京 한국어."),
            said("user", "🙂"),
            said("assistant", "🙃🙃 \u00a0x"),
        ]
    },
]
THINKING: list[dict[str, Any]] = [
    {
        "messages": [
            *(said("user", "1?"), said("assistant", "One.", reasoning_content="It asks for one.")),
            *(said("user", "2?"), said("assistant", "Two.", reasoning_content="And now for two.\nSo: two.")),
        ]
    },
]
WITH_TOOLS: list[dict[str, Any]] = [
    {
        "messages": [
            *(said("user", "Weather in Köln?"), called("Köln"), said("tool", '{"sky": "🌧"}')),
            *(said("assistant", "Rain."), said("user", "And in Rome?"), called("Rome"), said("tool", "sun")),
            *(said("assistant", "Sun."), said("user", "Thanks"), said("assistant", "You are welcome.")),
        ],
        "tools": [TOOL],
    },
]
CONVERSATIONS = {
    "ChatML": PLAIN,
    "Llama 3": [*PLAIN, *WITH_TOOLS],
    "OLMo 3": [*PLAIN, *WITH_TOOLS],
    **{name: [*PLAIN, *THINKING, *WITH_TOOLS] for name in ("Qwen3", "gpt-oss", "GLM-4.5")},
}
