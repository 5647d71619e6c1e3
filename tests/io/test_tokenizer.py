"""Tokenizers: from a folder, from GGUF metadata, bytes of tokens, chat templates."""

import json

import pytest
import tokenizers
from conftest import CHATML, SPECIAL, vocabulary

from jaxdec.io.gguf_tokenizer import stop_tokens
from jaxdec.io.tokenizer import Tokenizer, byte_of_char

TEXTS = [
    "the hello  12 345",
    "tabs\tand\n\nlines  ",
    "naïve – 日本語 🙂👩‍🚀",
    "",
    " ",
    "<|im_start|>user\nhe<|im_end|>",
    "\x00\x7f",
]


def gguf_fields(**changes):
    tokens = vocabulary(272)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
        "tokenizer.ggml.merges": ["h e", "l l", "Ġ t"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def spm_fields():
    words = ["▁", "t", "h", "e", "▁t", "he", "▁the", "l"]
    scores = [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -9.0]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_byte_level_round_trip(text, pre):
    tokenizer = Tokenizer.from_gguf(gguf_fields(pre=pre))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_special_tokens():
    tokenizer = Tokenizer.from_gguf(gguf_fields())
    assert tokenizer.encode("<|im_start|>he<|im_end|>") == [1, 259, 2]
    assert tokenizer.decode([1, 259, 2]) == "he"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 272)
    assert tokenizer.token_id("<|im_end|>") == 2 and tokenizer.token_id("zz") is None


def test_bos_is_added_where_the_file_says_so():
    tokenizer = Tokenizer.from_gguf(gguf_fields(add_bos_token=True))
    assert tokenizer.encode("he") == [1, 259]
    assert tokenizer.encode("he", add_special_tokens=False) == [259]
    unsaid = gguf_fields(pre="llama-bpe")
    assert Tokenizer.from_gguf(unsaid).encode("he") == [1, 259]
    said = gguf_fields(pre="llama-bpe", add_bos_token=False)
    assert Tokenizer.from_gguf(said).encode("he") == [259]


def test_sentencepiece():
    tokenizer = Tokenizer.from_gguf(spm_fields())
    the = tokenizer.token_id("▁the")
    assert tokenizer.encode("the") == [1, the]
    for text in ("the tell he", "日本 🙂", "he  the"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == b" " + text.encode()


def test_bytes_of_a_character_come_one_by_one():
    tokenizer = Tokenizer.from_gguf(gguf_fields())
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("é")]
    assert pieces == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
    assert tokenizer.token_bytes(1) == b"<|im_start|>"
    assert tokenizer.token_bytes(10**6) == b""
    with pytest.raises(ValueError, match="start at 0"):
        tokenizer.token_bytes(-1)


def test_every_byte_has_a_character():
    assert sorted(byte_of_char().values()) == list(range(256))
    assert byte_of_char()["Ġ"] == ord(" ") and byte_of_char()["Ċ"] == ord("\n")


def test_unknown_kinds_raise():
    with pytest.raises(ValueError, match="'new-rule'.*tokenizer.json"):
        Tokenizer.from_gguf(gguf_fields(pre="new-rule"))
    with pytest.raises(ValueError, match="'bert'.*tokenizer.json"):
        Tokenizer.from_gguf(gguf_fields(model="bert"))


def test_stop_tokens_are_named_or_known():
    fields = gguf_fields(eot_token_id=5, eom_token_id=2)
    assert stop_tokens(fields) == (2, 5, 0)
    assert stop_tokens({}) == ()


def test_folder(tmp_path):
    made = Tokenizer.from_gguf(gguf_fields())
    made.save(tmp_path)
    read = Tokenizer.from_folder(tmp_path)
    assert read.special_tokens == made.special_tokens
    assert read.chat_template == CHATML and read.eos_id == 2
    assert read.fingerprint() == made.fingerprint()
    assert [read.encode(t) for t in TEXTS] == [made.encode(t) for t in TEXTS]

    settings = tmp_path / "tokenizer_config.json"
    templates = [
        {"name": "tool", "template": "t"},
        {"name": "default", "template": "d"},
    ]
    token = {"content": "<|im_end|>", "special": True}
    settings.write_text(json.dumps({"chat_template": templates, "eos_token": token}))
    read = Tokenizer.from_folder(tmp_path)
    assert read.chat_template == "d" and read.eos_id == 2 and read.bos_id is None
    (tmp_path / "chat_template.jinja").write_text("j")
    assert Tokenizer.from_folder(tmp_path).chat_template == "j"
    settings.write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="fetch it again"):
        Tokenizer.from_folder(tmp_path)


def test_compatible():
    mine = Tokenizer.from_gguf(gguf_fields())
    assert mine.compatible(Tokenizer.from_gguf(gguf_fields(pre="gpt-2"))) is None
    tokens = vocabulary(272)
    tokens[5], tokens[6] = tokens[6], tokens[5]
    other = Tokenizer.from_gguf(gguf_fields(tokens=tokens))
    assert f"token id 5 is {tokens[6]!r}" in mine.compatible(other)
    assert mine.fingerprint() != other.fingerprint()
    longer = Tokenizer.from_gguf(gguf_fields(tokens=[*vocabulary(272), "new"]))
    assert "token id 272 is None" in mine.compatible(longer)
    padded = Tokenizer.from_gguf(gguf_fields(tokens=vocabulary(300)))
    assert mine.compatible(padded) is None
    assert mine.fingerprint() == padded.fingerprint()


def chat(template, **special):
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), special, template)


def test_chat():
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = chat(CHATML)
    assert tokenizer.is_chat
    start = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.apply_chat(messages) == start + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat(messages, add_generation_prompt=False) == start
    with pytest.raises(ValueError, match="base model"):
        chat(None).apply_chat(messages)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ pad_token }}|", "<s>|"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),
        ("{% if tools is none %}no{% endif %}{{ flag }}", "noTrue"),
        ("a\n    {% if true %}\nb\n    {% endif %}\nc", "a\nb\nc"),
        (
            "{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}x{% endfor %}",
            "x",
        ),
        (
            "{% set x = 1 %}{% generation %}y{% set x = 2 %}{% endgeneration %}{{ x }}",
            "y1",
        ),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_templates_render_as_in_the_hub(template, expected):
    messages = [{"role": "user", "content": "<é>"}]
    rendered = chat(template, bos_token="<s>").apply_chat(messages, flag=True)
    assert rendered == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages + 1 }}", "concatenate"),
    ],
)
def test_templates_are_in_a_sandbox_and_may_refuse(template, message):
    with pytest.raises(ValueError, match=message):
        chat(template).apply_chat([])
