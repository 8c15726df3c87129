"""Chat templates in our own words: each keeps, drops and reads thoughts as its family's, which `make test-templates`
tries as published.

They write ChatML around it and calls as JSON, so that one tokenizer and one model serve all of them.
"""

import json
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

from inference_svc.model import kvasir_tiny
from tests.inference.engine.tiny_models import LLAMA, VOCABULARY, write_model

_CALLS = """
{%- macro calls(message, first) -%}
{%- for call in message.tool_calls or () -%}
{%- set tool_call = call.function -%}
{{- ('\\n' if first or not loop.first else '') + '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": '
    + (tool_call.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endmacro -%}
{%- macro other(message) -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endmacro -%}
"""
# Where the last question stands: thoughts behind it are of the loop that is under way.
_LAST_QUESTION = """
{%- set place = namespace(question=-1) -%}
{%- for message in messages if message.role == 'user' -%}
{%- set place.question = messages.index(message) -%}
{%- endfor -%}
"""
_SPLIT = """
{%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' -%}
{%- set answer = message.content -%}
{%- if not thoughts and '</think>' in answer -%}
{%- set thoughts = answer.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set answer = answer.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
"""

# Thoughts behind the last question stay. `enable_thinking` false writes empty ones for the reply.
QWEN3 = f"""{_CALLS}{_LAST_QUESTION}
{{%- for message in messages -%}}
{{%- if message.role != 'assistant' -%}}{{{{ other(message) }}}}
{{%- else -%}}{_SPLIT}
{{{{- '<|im_start|>assistant\\n' -}}}}
{{%- if loop.index0 > place.question and (loop.last or thoughts) -%}}
{{{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' -}}}}
{{%- endif -%}}
{{{{- answer.lstrip('\\n') + calls(message, answer) + '<|im_end|>\\n' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '') -}}}}
{{%- endif -%}}
"""
# The same; older replies show that they had thoughts. `enable_thinking` false is also said behind the question, and
# `clear_thinking` false keeps all thoughts. No prompt has the line's end before the thoughts, and what ends a reply is
# the next message's.
GLM = f"""{_CALLS}{_LAST_QUESTION}
{{%- for message in messages -%}}
{{%- if loop.previtem is defined and loop.previtem.role == 'assistant' -%}}{{{{- '<|im_end|>\\n' -}}}}{{%- endif -%}}
{{%- if message.role != 'assistant' -%}}
{{{{- '<|im_start|>' + message.role + '\\n' + message.content -}}}}
{{%- if message.role == 'user' and enable_thinking is false -%}}{{{{- '/nothink' -}}}}{{%- endif -%}}
{{{{- '<|im_end|>\\n' -}}}}
{{%- else -%}}{_SPLIT}
{{%- set is_kept = loop.index0 > place.question or (clear_thinking is defined and not clear_thinking) -%}}
{{{{- '<|im_start|>assistant\\n<think>' + (thoughts.strip() if is_kept else '') + '</think>' -}}}}
{{{{- ('\\n' + answer.strip() if answer.strip() else '') + calls(message, true) -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{- '<|im_start|>assistant' + ('\\n<think></think>' if enable_thinking is false else '') -}}}}
{{%- endif -%}}
"""
# As MiniMax's, and a line ends behind the calls, too.
NEMOTRON = f"""{_CALLS}{_LAST_QUESTION}
{{%- for message in messages -%}}
{{%- if message.role != 'assistant' -%}}{{{{ other(message) }}}}
{{%- else -%}}{_SPLIT}
{{{{- '<|im_start|>assistant\\n' -}}}}
{{%- set is_kept = thoughts and loop.index0 > place.question -%}}
{{{{- '<think>\\n' + thoughts + '\\n</think>\\n' if is_kept else '<think></think>' -}}}}
{{{{- answer.strip() + calls(message, answer.strip()) + ('\\n' if message.tool_calls else '') + '<|im_end|>\\n' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- '<|im_start|>assistant\\n<think>\\n' -}}}}{{%- endif -%}}
"""
# Keeps thoughts before calls alone, behind the last question.
GEMMA = f"""{_CALLS}{_LAST_QUESTION}
{{%- for message in messages -%}}
{{%- if message.role != 'assistant' -%}}{{{{ other(message) }}}}
{{%- else -%}}
{{{{- '<|im_start|>assistant\\n' -}}}}
{{%- if message.reasoning and message.tool_calls and loop.index0 > place.question -%}}
{{{{- '<think>\\n' + message.reasoning + '\\n</think>' -}}}}
{{%- endif -%}}
{{{{- calls(message, false) + message.content.split('</think>')[-1] + '<|im_end|>\\n' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- '<|im_start|>assistant\\n' -}}}}{{%- endif -%}}
"""
# Always thinks: the prompt opens the thoughts. Those behind the last question stay.
MINIMAX = f"""{_CALLS}{_LAST_QUESTION}
{{%- for message in messages -%}}
{{%- if message.role != 'assistant' -%}}{{{{ other(message) }}}}
{{%- else -%}}{_SPLIT}
{{{{- '<|im_start|>assistant\\n' -}}}}
{{%- if thoughts and loop.index0 > place.question -%}}
{{{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' -}}}}
{{%- endif -%}}
{{{{- answer + calls(message, true) + '<|im_end|>\\n' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- '<|im_start|>assistant\\n<think>\\n' -}}}}{{%- endif -%}}
"""
# Always thinks, and keeps no thoughts.
DEEPSEEK_R1 = f"""{_CALLS}
{{%- for message in messages -%}}
{{%- if message.role != 'assistant' -%}}{{{{ other(message) }}}}
{{%- else -%}}
{{{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1] + calls(message, message.content) -}}}}
{{{{- '<|im_end|>\\n' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- '<|im_start|>assistant\\n<think>\\n' -}}}}{{%- endif -%}}
"""
# Thinks when `thinking` says so, and keeps no thoughts: each reply ends some.
DEEPSEEK_V31 = f"""{_CALLS}
{{%- if not thinking is defined -%}}{{%- set thinking = false -%}}{{%- endif -%}}
{{%- for message in messages -%}}
{{%- if message.role != 'assistant' -%}}{{{{ other(message) }}}}
{{%- else -%}}
{{{{- '<|im_start|>assistant\\n</think>' + message.content.split('</think>')[-1] + calls(message, false) -}}}}
{{{{- '<|im_end|>\\n' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{- '<|im_start|>assistant\\n' + ('<think>' if thinking else '</think>') -}}}}
{{%- endif -%}}
"""
# Thinks unless `thinking` says not to, and keeps the thoughts behind the last question. No white space stands around.
DEEPSEEK_V32 = f"""{_CALLS}{_LAST_QUESTION}
{{%- for message in messages -%}}
{{%- if message.role != 'assistant' -%}}{{{{ other(message) }}}}
{{%- else -%}}
{{{{- '<|im_start|>assistant\n' -}}}}
{{%- if loop.index0 > place.question and not (thinking is defined and not thinking) -%}}
{{{{- '<think>' + (message.reasoning_content or '') -}}}}
{{%- endif -%}}
{{{{- '</think>' + message.content + calls(message, true) + '<|im_end|>\n' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{- '<|im_start|>assistant\n' + ('</think>' if thinking is defined and not thinking else '<think>') -}}}}
{{%- endif -%}}
"""
# Knows no thoughts.
QWEN25 = f"""{_CALLS}
{{%- for message in messages -%}}
{{%- if message.role != 'assistant' -%}}{{{{ other(message) }}}}
{{%- else -%}}
{{{{- '<|im_start|>assistant\\n' + message.content + calls(message, message.content) + '<|im_end|>\\n' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- '<|im_start|>assistant\\n' -}}}}{{%- endif -%}}
"""
# An empty line before calls, and the end of a line between them.
QWEN3_CODER = QWEN25.replace("message.content + calls", "message.content + ('\\n' if message.content else '') + calls")
# Harmony: thoughts are messages of a channel, and stay before calls until an answer came. Both thoughts and text before
# a call are refused, and so are channels inside of texts. `reasoning_effort` is printed.
GPT_OSS = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- if '<|channel|>' in message.content or '<|channel|>' in (message.thinking or '') -%}
{{- raise_exception('channels inside of texts') -}}
{%- endif -%}
{%- if 'tool_calls' in message -%}
{%- if message.content and message.thinking -%}{{- raise_exception('text and thoughts before a call') -}}{%- endif -%}
{%- set later = namespace(answered=false) -%}
{%- for each in messages[loop.index:] if each.role == 'assistant' and 'tool_calls' not in each -%}
{%- set later.answered = true -%}
{%- endfor -%}
{%- if (message.content or message.thinking) and not later.answered -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' -}}
{%- endif -%}
{%- set tool_call = message.tool_calls[0].function -%}
{{- '<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json<|message|>'
    + (tool_call.arguments | tojson) + '<|call|>' -}}
{%- elif loop.last and not add_generation_prompt -%}
{%- if 'thinking' in message -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' -}}
{%- else -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' -}}
{%- else -%}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""

TEMPLATES = {
    "qwen3": QWEN3,
    "glm": GLM,
    "minimax": MINIMAX,
    "nemotron": NEMOTRON,
    "gemma": GEMMA,
    "deepseek-r1": DEEPSEEK_R1,
    "deepseek-v3.1": DEEPSEEK_V31,
    "deepseek-v3.2": DEEPSEEK_V32,
    "qwen2.5": QWEN25,
    "qwen3-coder": QWEN3_CODER,
    "gpt-oss": GPT_OSS,
}
_THINK = ("<think>", "</think>")
THINK, THOUGHT = VOCABULARY, VOCABULARY + 1  # tokens of these markers
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>")


def write_tokenizer(directory: Path, family: str) -> Path:
    """kvasir-tiny's tokenizer with the family's markers and template, in a directory that may hold a model."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((kvasir_tiny.path() / "tokenizer.json").read_text())
    first, added = len(tokenizer["model"]["vocab"]), tokenizer["added_tokens"]
    first = max(first, 1 + max(token["id"] for token in added))
    is_harmony = family == "gpt-oss"
    for number, marker in enumerate(_HARMONY if is_harmony else _THINK):
        added.append({**added[-1], "id": first + number, "content": marker, "special": is_harmony})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATES[family])
    shutil.copy(kvasir_tiny.path() / "tokenizer_config.json", directory / "tokenizer_config.json")
    return directory


def write_thinking_model(directory: Path, family: str) -> Path:
    """Random weights behind the family's template and markers, which come only where something makes them likely."""
    markers = _HARMONY if family == "gpt-oss" else _THINK
    write_model(directory, {**LLAMA, "vocab_size": VOCABULARY + len(markers)})
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][VOCABULARY:] = 0
    save_file(weights, directory / "model.safetensors")
    return write_tokenizer(directory, family)
