"""Chat templates with the habits of well-known families, each written down small."""

from __future__ import annotations

QWEN3_LIKE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- 'Call tools inside <tool_call></tool_call>.\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- set said = message.content %}
        {%- if '</think>' in said %}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set said = said.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- said }}
        {%- for call in message.tool_calls or [] %}
            {%- if said or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
QWEN3_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
               "</think>")  # fmt: skip

LLAMA3_LIKE = r"""
{{- '<|begin|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|head|>' + role + '<|/head|>\n\n' }}
    {%- if message.role == 'tool' %}
        {{- '"' + (message.content | tojson)[1:-1] + '"' }}
    {%- elif message.tool_calls %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- (message.tool_calls[0].function.arguments | tojson) + '}' }}
    {%- else %}
        {%- if tools and loop.first %}
            {%- for tool in tools %}{{- (tool | tojson) + '\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\n\n' }}{%- endif %}
"""
LLAMA3_ADDED = ("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>")

MISTRAL_LIKE = r"""
{{- '<s>' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}{{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.tool_calls %}
            {{- '[CALLS]' + (message.tool_calls | tojson) + '</s>' }}
        {%- else %}{{- message.content + '</s>' }}{%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('9 letters') }}{%- endif %}
        {{- '[RESULTS]' + message.content + '[/RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL_ADDED = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULTS]",
                 "[/RESULTS]")  # fmt: skip
