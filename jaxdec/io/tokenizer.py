"""Text to token ids and back, with the chat template of a model.

A thin layer over the ``tokenizers`` library. What it adds is what decoding needs: the
raw bytes of a single token (for streaming text whose characters span tokens), a
comparison of two vocabularies (a drafter must speak the target's), and the rendering
of chat templates as Hugging Face renders them, in a sandbox.
"""

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdec.io import gguf_tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """The tokenizer of one model.

    Args:
        backend: A ``tokenizers.Tokenizer``.
        special_tokens: Texts of ``bos_token``, ``eos_token``, ...; chat templates see
            them under these names.
        chat_template: A Jinja template, or None for a model without chat format.
    """

    def __init__(
        self,
        backend: Any,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads ``tokenizer.json`` and what lies beside it in a Hugging Face folder.

        A ``chat_template.jinja`` overrides the template in ``tokenizer_config.json``.
        """
        import tokenizers

        folder = Path(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare exceptions
            raise ValueError(
                f"{folder / 'tokenizer.json'} cannot be read ({error}); fetch it "
                "again, or update the tokenizers package."
            ) from error

        def read(name: str) -> dict[str, Any]:
            path = folder / name
            if not path.exists():
                return {}
            try:
                return json.loads(path.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path} is not valid JSON ({error}); fetch it again."
                ) from error

        settings = read("special_tokens_map.json") | read("tokenizer_config.json")
        special = {}
        for name in _SPECIAL_NAMES:
            token = settings.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[name] = token
        template = settings.get("chat_template")
        if isinstance(template, list):
            by_name = {entry["name"]: entry["template"] for entry in template}
            template = by_name.get("default")
        template = read("chat_template.json").get("chat_template", template)
        jinja = folder / "chat_template.jinja"
        if jinja.exists():
            template = jinja.read_text(encoding="utf-8")
        return cls(backend, special, template)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> "Tokenizer":
        """Builds the tokenizer that the metadata of a GGUF file describes.

        Args:
            fields: Metadata of the file, as Python values.

        Raises:
            ValueError: The kind of tokenizer, or its way of splitting text, is unknown.
        """
        backend = gguf_tokenizer.build(fields)
        tokens = fields.get("tokenizer.ggml.tokens")
        special = {}
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        ):
            index = fields.get(f"tokenizer.ggml.{key}")
            if index is not None and tokens is not None and index < len(tokens):
                special[name] = tokens[index]
        return cls(backend, special, fields.get("tokenizer.chat_template"))

    def save(self, folder: str | Path) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json`` into a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = dict(self.special_tokens)
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings, ensure_ascii=False, indent=1), encoding="utf-8"
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Special tokens written out in it become single ids.
            add_special_tokens: Whether to add what the model expects around plain text
                (often a BOS token). Pass False for the output of `apply_chat`, which
                holds these tokens already.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special_tokens
        )

    def token_bytes(self, index: int) -> bytes:
        """The raw bytes of one token: part of a character, or several.

        Bytes of successive tokens concatenate to the text. (SentencePiece models start
        a text with a space that `decode` removes.) An id without a token, which padded
        embeddings allow, has no bytes.
        """
        if index < 0:
            raise ValueError(f"token ids start at 0, got {index}.")
        token = self._backend.id_to_token(int(index))
        if token is None:
            return b""
        if int(index) in self._added:
            return token.encode("utf-8")
        if self._is_byte_level:
            table = byte_of_char()
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
            return token.encode("utf-8")
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode("utf-8")

    def prepare(self) -> None:
        """Reads what tokens are looked up in, which else the first token has to.

        Raises:
            ValueError: single tokens of this tokenizer have no bytes.
        """
        _ = self._special, self._added, self._is_byte_level
        byte_of_char()

    def is_special(self, index: int) -> bool:
        """Whether a token marks structure (end of turn, ...) and has no text."""
        return int(index) in self._special

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self._backend.to_str())["decoder"]
        kinds = _kinds(decoder)
        if "ByteLevel" in kinds:
            return True
        if kinds & {"ByteFallback", "Metaspace", "Replace"}:
            return False
        raise ValueError(
            f"the tokenizer's decoder is {sorted(kinds) or None}; single tokens can be "
            "turned into bytes only for byte-level BPE and SentencePiece."
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's embeddings may have more rows."""
        return max(self._tokens, default=-1) + 1

    @functools.cached_property
    def _tokens(self) -> dict[int, str]:
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return {index: token for token, index in vocabulary.items()}

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its text, or None."""
        return self._backend.token_to_id(token)

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text, if there is one."""
        token = self.special_tokens.get("bos_token")
        return None if token is None else self.token_id(token)

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text; a model may have further stop tokens."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self.token_id(token)

    @property
    def is_chat(self) -> bool:
        """Whether the model comes with a chat template."""
        return self.chat_template is not None

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Renders a conversation as the text that the model was trained on.

        Encode the result with ``add_special_tokens=False``.

        Args:
            messages: Dictionaries with ``role`` and ``content``.
            add_generation_prompt: Whether to end where the assistant begins to speak.
            **variables: Further variables of the template (``tools``, ...).

        Raises:
            ValueError: There is no template, or it rejects the messages.
        """
        import jinja2

        if self.chat_template is None:
            raise ValueError(
                "apply_chat needs a chat template, and this model comes without one "
                "(it is a base model); encode plain text instead."
            )
        values = {"tools": None, "documents": None} | self.special_tokens | variables
        try:
            return _template(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template rejects these messages: {error}. Pass dictionaries "
                "with 'role' and 'content', in an order that the model supports."
            ) from error

    def fingerprint(self) -> str:
        """A hash of which text every id stands for."""
        digest = hashlib.sha256()
        for index in sorted(self._tokens):
            if not _is_padding(index, self._tokens[index]):
                digest.update(f"{index}\t{self._tokens[index]}\n".encode())
        return digest.hexdigest()

    def compatible(self, other: "Tokenizer") -> str | None:
        """None if every id means the same in both, else where they first differ."""
        for index in range(max(self.vocab_size, other.vocab_size)):
            mine, theirs = self._tokens.get(index), other._tokens.get(index)
            if mine != theirs and not (
                _is_padding(index, mine) and _is_padding(index, theirs)
            ):
                return (
                    f"token id {index} is {mine!r} in one tokenizer and {theirs!r} in "
                    "the other; use two models with the same vocabulary."
                )
        return None


def _is_padding(index: int, token: str | None) -> bool:
    """Whether no text becomes this id: rows that pad a vocabulary to a round size."""
    return token is None or token == f"[PAD{index}]"


def _kinds(decoder: Any) -> set[str]:
    if decoder is None:
        return set()
    kinds = {decoder["type"]}
    for part in decoder.get("decoders", ()):
        kinds |= _kinds(part)
    return kinds


@functools.cache
def byte_of_char() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for the 256 bytes.

    Bytes that are printable in Latin-1 stand for themselves; the others take code
    points from 256 up, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


@functools.cache
def _template(source: str) -> Any:
    """A compiled template, in the environment that chat templates are written for."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Marks what the assistant says; the marks matter only for training."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
    ):
        # Jinja's own filter escapes characters for HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: (
        datetime.datetime.now().strftime(layout)
    )
    return environment.from_string(source)
