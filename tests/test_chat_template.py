"""Chat templates: the reference renderer's text byte for byte, clear refusals, which template counts."""

import pytest
from chat_cases import CALLS, CHAT, TOOLS, USER
from make_tokenizers import CHATML, write_bpe_folder, write_bpe_gguf

from nano_oasis.tokenizer import TemplateError, Tokenizer, TokenizerError, load_tokenizer
from nano_oasis.tokenizer import chat_template as module
from nano_oasis.tokenizer.chat_template import ChatTemplate

GOLDEN = {
    "plain": (CHATML, CHAT, {}),
    "trimmed blocks": (
        "{%- set x = 1 %}\n  {% for m in messages %}\n    {% if m.role == 'user' %}\n"
        "  [{{ m.content | trim }}]\n    {% else %}\n{{ m.content }}\n    {%- endif %}\n  {% endfor %}\n"
        "  end  \n\n",
        CHAT,
        {},
    ),
    "tojson": ("{{ tools | tojson }}|{{ messages[0] | tojson }}", CHAT, {"tools": TOOLS}),
    "tojson options": (
        "{{ tools | tojson(indent=4) }}{{ messages[1]|tojson(ensure_ascii=true) }}"
        "{{ tools|tojson(separators=(',', ':'), sort_keys=True) }}",
        CHAT,
        {"tools": TOOLS},
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }};"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
        CHAT,
        {},
    ),
    "generation tag": (
        "{% for m in messages %}{% if m.role == 'assistant' %}\n  {% generation %}\n"
        "{% set y = 1 %}{{ m.content }}\n  {% endgeneration %}\n{{ y is defined }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}",
        CHAT,
        {},
    ),
    "date": ("{{ strftime_now('%Y-%m-%d %B') }}{{ date_string is defined }}", CHAT, {}),
    "namespace and macro": (
        "{% set ns = namespace(n=0, last='') %}{% macro show(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
        "{% for m in messages if m.role != 'system' %}{% set ns.n = ns.n + 1 %}{{ show(m) }}{% endfor %}"
        "{{ ns.n }}",
        CHAT,
        {},
    ),
    "tool calls": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}("
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }},{% endfor %})"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ m.role }}:{{ m.content }}{% endfor %}",
        CALLS,
        {},
    ),
    "string methods": (
        "{% for m in messages %}{{ m['content'].strip().split(' ')[-1] }}{{ m.content[:3] | upper }}"
        "{{ m.content.startswith('  ') }}{{ m.content | length }}{{ m.get('name', 'none') }}{% endfor %}"
        "{{ [1, 2] | join('-') }}{{ {'a': none} }}{{ 'x' ~ 1.0 }}",
        CHAT,
        {},
    ),
    "variables": (
        "{{ bos_token }}{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
        "{% if documents %}{{ documents[0].text }}{% endif %}{{ tools is none }}{{ add_generation_prompt }}",
        CHAT,
        {"enable_thinking": False, "documents": [{"title": "t", "text": "ä<b>"}]},
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_the_reference(name, prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    source, messages, options = GOLDEN[name]
    template = ChatTemplate(source, {"bos_token": "<s>"})
    tools = options.get("tools")
    variables = {k: v for k, v in options.items() if k != "tools"}
    ours = template.render(messages, tools=tools, add_generation_prompt=prompt, variables=variables)
    theirs, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=prompt, bos_token="<s>", **options
    )
    assert ours == theirs[0]


# --- refusals ---------------------------------------------------------------------------------------------

ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant, déjà vu') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ALTERNATE, "Roles must alternate user/assistant, déjà vu"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "the chat template failed"),
        ("{{ messages[0].content | items | list }}", "item pairs"),
        ("{{ nothing | tojson }}", "the chat template failed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe|not safely callable"),
        (
            "{% for i in range(10**6) %}{% for j in range(10**6) %}{% endfor %}{% endfor %}",
            "loops over more than",
        ),
        ("{% for i in range(10**100) %}{% endfor %}", "too large"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_refuses_or_fails(source, message):
    with pytest.raises(TemplateError, match=message) as caught:
        ChatTemplate(source).render([USER, USER])
    assert caught.value.param == "messages"


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_OUTPUT", 100_000)
    source = "{% for i in range(1000) %}{{ messages[0].content }}{{ i }}{% endfor %}"
    assert ChatTemplate(source).render([USER]).startswith("hi0hi1")
    with pytest.raises(TemplateError, match="100000 characters"):
        ChatTemplate(source).render([{"role": "user", "content": "x" * 1000}])


def test_a_model_without_template(tmp_path):
    tokenizer = load_tokenizer(write_bpe_folder(tmp_path))
    assert tokenizer.chat_template is None and tokenizer.encode("still works")
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.encode_chat([USER])


@pytest.mark.parametrize("where", ["config", "jinja", "gguf", "override"])
def test_a_syntax_error_fails_at_load(tmp_path, where):
    bad = "fine\n{% if %}"
    with pytest.raises(TokenizerError, match="line 2"):
        if where == "gguf":
            load_tokenizer(write_bpe_gguf(tmp_path / "x.gguf", chat_template=bad))
        elif where == "override":
            load_tokenizer(write_bpe_folder(tmp_path, chat_template=CHATML), bad)
        elif where == "config":
            load_tokenizer(write_bpe_folder(tmp_path, chat_template=bad))
        else:
            (write_bpe_folder(tmp_path) / "chat_template.jinja").write_text(bad)
            load_tokenizer(tmp_path)


# --- which template ---------------------------------------------------------------------------------------


def test_where_the_template_comes_from(tmp_path):
    def text(tokenizer: Tokenizer, **options) -> str:
        return tokenizer.render_chat([USER], **options)

    folder = write_bpe_folder(tmp_path / "a", chat_template="config {{ eos_token }}")
    assert text(load_tokenizer(folder)) == "config </s>"
    (folder / "chat_template.jinja").write_text("jinja {{ bos_token }} ä", encoding="utf-8")
    assert text(load_tokenizer(folder)) == "jinja <s> ä"
    tokenizer = load_tokenizer(folder, "override {{ messages[0].content }}")
    assert text(tokenizer) == "override hi" and tokenizer.chat_template.startswith("override")
    named = [
        {"name": "default", "template": "one"},
        {"name": "tool_use", "template": "two {{ tools[0].type }}"},
    ]
    tokenizer = load_tokenizer(write_bpe_folder(tmp_path / "b", chat_template=named))
    assert (text(tokenizer), text(tokenizer, tools=TOOLS), tokenizer.chat_template) == (
        "one",
        "two function",
        "one",
    )
    keys = {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer = load_tokenizer(
        write_bpe_gguf(tmp_path / "a.gguf", chat_template="{{ bos_token + eos_token }}", **keys)
    )
    assert text(tokenizer) == "<s></s>"
    tokenizer = load_tokenizer(write_bpe_gguf(tmp_path / "b.gguf", chat_template=named, **keys))
    assert (text(tokenizer), text(tokenizer, tools=TOOLS)) == ("one", "two function")


def test_variables_reach_the_template(tmp_path):
    tokenizer = load_tokenizer(
        write_bpe_folder(tmp_path, chat_template="{{ think }}{{ add_generation_prompt }}")
    )
    assert tokenizer.render_chat([USER], think=3, add_generation_prompt=False) == "3False"
    assert tokenizer.render_chat([USER]) == "True"
