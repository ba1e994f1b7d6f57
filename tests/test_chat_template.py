"""Chat templates: the reference's prompts, real templates' idioms, and attacks that must end quickly."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotneuron.models import template_limits
from hotneuron.models.chat_template import KEY, MAX_TEMPLATE_CHARS, ChatTemplate
from hotneuron.models.errors import HotneuronError, ModelFileError, RequestError

HI = [{"role": "user", "content": "Hi"}]


def rendered(template: str, messages: list[dict[str, Any]] = HI, **kwargs: Any) -> str:
    return ChatTemplate.from_metadata({KEY: template}, "x.gguf").render(messages, **kwargs)


def test_prompts_equal_the_reference(default_metadata: dict[str, Any], reference: dict[str, Any]) -> None:
    template = ChatTemplate.from_metadata(default_metadata)
    assert len(reference["chat"]) == 2 and not template.is_fallback
    for case in reference["chat"]:
        assert template.render(case["messages"]) == case["prompt"]


def test_chatml_stands_in_for_a_missing_template() -> None:
    template = ChatTemplate.from_metadata({})
    assert template.is_fallback
    assert template.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_special_tokens_are_variables() -> None:
    md = {
        KEY: "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
    }
    md |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.padding_token_id": 7}
    assert ChatTemplate.from_metadata(md).render(HI) == "<s>|</s>||"


LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


def test_idioms_of_real_templates() -> None:
    assert rendered(LLAMA3, [{"role": "user", "content": " Hi \n"}]) == (
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert rendered(MISTRAL) == "[INST] Hi [/INST]"
    cases = {
        "{%- set ns = namespace(n=0) -%}{%- for m in messages %}{%- set ns.n = ns.n + 1 %}{%- endfor %}{{ ns.n }}": "2",
        "{% for m in messages[::-1] %}{{ m.content }}{{ ',' if not loop.last }}{{ loop.length }}{% endfor %}": "Hi,2A2",
        "{% macro say(m) %}<{{ m.role|upper }}>{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}": (
            "<SYSTEM><USER>"
        ),
        "{% if tools is not none %}x{% endif %}{% if tools is defined and tools %}y{% endif %}": "",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('-') }}": "Hi",
        "{{ messages[0] | tojson }}": '{"role": "system", "content": "A"}',
        "{{ messages[0] | tojson(indent=1) }}": '{\n "role": "system",\n "content": "A"\n}',
        "{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v ~ ';' }}{% endfor %}": "role=system;content=A;",
        "{{ 'a<think>b</think>c'.split('</think>')[-1].lstrip('\\n') }}": "c",
        "{{ 'x\ny'|indent(2) }}": "x\n  y",
        "{{ [1, 2] + [3] }}{{ {'a': none} }}{{ true }}{{ undefined_name }}": "[1, 2, 3]{'a': None}True",
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
        "{% generation %}{{ messages[1].content }}{% endgeneration %}": "Hi",
        "{% set x %}{{ 'q' }}r{% endset %}{{ x }}{{ '%' }}{{ ('a', 'b')|length }}{{ '-' * 3 }}": "qr%2---",
        "{{ 'a-b'.replace('-', '+') }}{{ ', '.join(['x', 'y']) }}{{ 'é'|tojson }}": 'a+bx, y"é"',
        "{% for m in messages %}{{ m.content.replace('i', 'o').strip('A').split('o')|join('+') }}{% endfor %}": "H+",
        "{% for m in messages %}{{ '-'.join([m.role, m.content]).rstrip('i') }};{% endfor %}": "system-A;user-H;",
        "{{ {'pop': 1}.pop }}": "1",
        "{{ messages[0]['content'] is string }}{{ messages is iterable and messages is not mapping }}": "TrueTrue",
        "  {% if true %}\n  a\n  {% endif %}\n": "  a\n",
        "{{ content or 'none' }}{{ messages[5] is defined }}": "noneFalse",
    }
    for template, expected in cases.items():
        assert rendered(template, [{"role": "system", "content": "A"}, *HI]) == expected, template


def test_the_date_is_todays() -> None:
    assert rendered("{{ strftime_now('%Y-%m-%d') }}") == time.strftime("%Y-%m-%d")


def test_tools_reach_the_template() -> None:
    assert rendered("{{ tools | tojson }}", tools=[{"name": "f"}]) == '[{"name": "f"}]'


def test_a_refusal_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match=r"refuses them: Conversation roles must alternate"):
        rendered(MISTRAL, HI + HI)


@pytest.mark.parametrize("template", ["{{ 1 + messages }}", "{{ messages.x.y }}", "{{ none() }}", "{{ 1 / 0 }}"])
def test_an_error_while_rendering_is_one_line(template: str) -> None:
    with pytest.raises(RequestError, match=r"^messages: .*fails on them") as caught:
        rendered(template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ x | no_such_filter }}",
        "{% if x %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 150 + "]" * 150 + " }}",
        "{{ " + "1+" * 20000 + "1 }}",
        "{{ " + "9" * 5000 + " }}",
        "x" * (MAX_TEMPLATE_CHARS + 1),
        7,
    ],
)
def test_a_broken_template_is_the_files_fault(template: Any) -> None:
    with pytest.raises(ModelFileError, match=rf"^x\.gguf: {KEY}: ") as caught:
        rendered(template)
    assert "\n" not in str(caught.value)


STOPPED = (
    r"not allowed|more than|too large|too big|recursi|No filter named|line 1 uses|not plain|formats text|a Namespace"
    r"|'lipsum' is undefined"
)
MILLION = "{% set x = 'aaaaaaaaaa' * 100000 %}"
ATTACKS = [
    # reach
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ loop.__class__ }}{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ (messages|map(attribute='__class__')|list)[0] }}",
    "{{ [''] | map(attribute='__class__') | join }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ 'a'.format_map({}) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ ''|attr('__class__') }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ self.__init__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ dict.fromkeys('ab') }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    # endless
    "{% for i in range(1000000000) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{{ range(60000) | list | sort | unique | list | length }}" * 1000,
    MILLION + "{% set y = x | upper | lower | title %}" * 1500,
    "{% set x = 'b' * 1000000 %}{{ x.strip('a' * 1000000 + 'b') }}",
    "{% set x = 'b' * 1000000 %}{{ x | trim('a' * 1000000 + 'b') }}",
    "{% set x = 'a' * 4000000 %}{{ x.rfind('b' + x[:2000000]) }}",
    # huge
    MILLION + "".join(f"{{% set x{n} = x ~ x ~ x ~ x %}}" for n in range(1500)),
    MILLION + "".join(f"{{% set x{n} = x[1:] %}}" for n in range(2000)),
    MILLION + "".join(f"{{% set x{n} = x.upper() %}}" for n in range(2000)),
    "{{ 'a' * 1000000000000 }}",
    "{{ 1000000000000 * 'a' }}",
    "{{ [0] * 1000000000 }}",
    "{{ (0,) * 1000000000 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x|replace('a', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x|join(ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=(1,)) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for i in 'a'*50 %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns }}",
    "{% set a = [namespace(b=messages)] %}{{ a }}",
    MILLION + "{% for i in range(99999) %}{{ x }}{% endfor %}",
    MILLION + "{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
    "{% set y %}{% for i in range(99999) %}" + "data" * 9999 + "{% endfor %}{% endset %}",
    "{% macro m() %}"
    + "data" * 9999
    + "{% endmacro %}{% set y %}{% for i in range(99999) %}{{ m() }}{% endfor %}{% endset %}",
    MILLION + "{% set y = [x] * 99999 %}{{ y }}",
    MILLION + "{{ [x] * 99999 }}",
    MILLION + "{{ x | list | length }}{{ x.split('a') | length }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}{{ 'a'.zfill(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'a\n' | indent(1000000000) }}",
    MILLION + "{{ 'a\n' | indent(x ~ x ~ x ~ x ~ x) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    MILLION + "{{ range(99999)|list|tojson(separators=(x, x)) }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ lipsum(1000000) }}",
    "{{ [[1]] | sum(start=[]) }}",
]


@pytest.mark.parametrize("template", ATTACKS, ids=range(len(ATTACKS)))
def test_attacks_end_quickly_in_one_line(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.5)
    start = time.thread_time()
    with pytest.raises((ModelFileError, RequestError)) as caught:
        rendered(template)
    assert time.thread_time() - start < 3
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert re.search(STOPPED, str(caught.value))  # and not by a slip in the attack


DATA = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
DATA = DATA | st.lists(DATA, max_size=3) | st.dictionaries(st.text(max_size=4), DATA, max_size=3)


@given(
    messages=st.lists(
        st.fixed_dictionaries({"role": st.text(max_size=6)}, optional={"content": DATA, "name": DATA}), max_size=4
    )
    | DATA
)
@settings(max_examples=200, deadline=None)
def test_any_messages_give_a_prompt_or_a_request_error(messages: Any) -> None:
    for text in (None, LLAMA3, MISTRAL):
        try:
            assert isinstance(ChatTemplate.from_metadata({KEY: text}).render(messages), str)
        except RequestError as error:
            assert "\n" not in str(error)


SYNTAX = "{{ }} {% %} for in if else endif endfor set macro endmacro x 'a' 1 + * ~ | [ ] ( ) . , = == join list".split()


@given(words=st.lists(st.sampled_from(SYNTAX), max_size=25))
@settings(max_examples=300, deadline=None)
def test_any_template_gives_a_prompt_or_a_typed_error(words: list[str]) -> None:
    try:
        rendered(" ".join(words))
    except HotneuronError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "messages",
    [[], None, "x", [1], [{}], [{"role": 3}], [{"role": "user", "content": 5}], [{"role": "user", "x": object()}]],
)
def test_unusable_messages_are_named(messages: Any) -> None:
    with pytest.raises(RequestError, match=r"^messages"):
        rendered("{{ messages }}", messages)


def test_a_long_conversation_is_well_within_the_limits() -> None:
    messages = [{"role": role, "content": "word " * 200} for _ in range(500) for role in ("user", "assistant")]
    tools = [
        {"name": f"f{n}", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}} for n in range(50)
    ]
    assert len(rendered("{{ tools|tojson }}" + LLAMA3, messages, tools=tools)) > 1_000_000 + len(json.dumps(tools))
