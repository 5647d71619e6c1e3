"""Rebuilds a tokenizer from the metadata of a GGUF file.

A GGUF file stores a vocabulary, but only the *name* of the rule that splits text before
it is looked up. The rules were worked out once per name, and each was compared with
the reference implementation on thousands of strings; a name that is not listed raises,
because a rule that is nearly right gives ids that are wrong now and then.
"""

from collections.abc import Mapping
from typing import Any

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

_SMOLLM_RULES = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_GPT2_RULES = ("gpt-2", "mpt", "olmo", "jais")
_QWEN2_RULES = ("qwen2", "deepseek-r1-qwen")
_LLAMA3_RULES = ("llama-bpe", "llama3", "llama-v3", "falcon3")

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_STOP_TEXTS = frozenset(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|>
    <|eom_id|> </s> <|end_of_text|> <EOT> <eos> <turn|> <｜end▁of▁sentence｜>
    """.split()
)
"""Texts of tokens that end an answer, whatever the metadata says."""


def stop_tokens(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: those the metadata names, then those known by text."""
    named = [
        fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")
    ]
    tokens = fields.get("tokenizer.ggml.tokens", ())
    known = [index for index, token in enumerate(tokens) if token in _STOP_TEXTS]
    return tuple(dict.fromkeys(int(i) for i in [*named, *known] if i is not None))


def build(fields: Mapping[str, Any]) -> Any:
    """A ``tokenizers.Tokenizer`` for the metadata of a GGUF file.

    Raises:
        ValueError: The kind of vocabulary or the splitting rule is not supported.
    """
    kind = fields.get("tokenizer.ggml.model")
    whole = fields.get("tokenizer.huggingface.json")
    if whole:
        import tokenizers

        return tokenizers.Tokenizer.from_str(whole)
    if kind == "gpt2":
        return _byte_level(fields)
    if kind == "llama":
        return _sentencepiece(fields)
    raise ValueError(
        f"tokenizer model {kind!r} in a GGUF file is not supported; only 'gpt2' and "
        "'llama' are. Put the model's tokenizer.json beside the file."
    )


def _special_tokens(fields: Mapping[str, Any]) -> list[Any]:
    """Tokens to recognise before any splitting, in the order of their ids."""
    import tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type") or ()
    return [
        tokenizers.AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _add_bos(backend: Any, fields: Mapping[str, Any]) -> None:
    """Puts BOS before (and EOS after) plain text where the file asks for it.

    Files for Llama may leave the wish for BOS unsaid; llama.cpp then adds it.
    """
    from tokenizers import processors

    tokens = fields["tokenizer.ggml.tokens"]
    before, after = [], []
    for name, places in (("bos", before), ("eos", after)):
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        default = name == "bos" and (
            fields.get("tokenizer.ggml.model") == "llama"
            or fields.get("tokenizer.ggml.pre") in _LLAMA3_RULES
        )
        if (
            fields.get(f"tokenizer.ggml.add_{name}_token", default)
            and index is not None
        ):
            places.append((tokens[index], int(index)))
    if before or after:
        single = [t for t, _ in before] + ["$A"] + [t for t, _ in after]
        pair = single + [t for t, _ in before] + ["$B"] + [t for t, _ in after]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[*before, *after]
        )


def _byte_level(fields: Mapping[str, Any]) -> Any:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    rule = fields.get("tokenizer.ggml.pre")

    def split_by(pattern: str) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    normalizer = None
    if rule in _SMOLLM_RULES:
        # Digits come first: their split changes what the pattern sees as a word's end.
        digits = pre_tokenizers.Digits(individual_digits=True)
        split = pre_tokenizers.Sequence([digits, gpt2])
    elif rule in _GPT2_RULES:
        split = gpt2
    elif rule in _QWEN2_RULES:
        split, normalizer = split_by(_QWEN2), normalizers.NFC()
    elif rule in _LLAMA3_RULES:
        split = split_by(_LLAMA3)
    else:
        known = _SMOLLM_RULES + _GPT2_RULES + _QWEN2_RULES + _LLAMA3_RULES
        raise ValueError(
            f"the GGUF file splits text by the rule {rule!r}, which is not known here "
            f"(known: {', '.join(known)}). Put the model's tokenizer.json beside the "
            "file."
        )
    tokens = fields["tokenizer.ggml.tokens"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[
                tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]
            ],
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=rule in _LLAMA3_RULES,
        )
    )
    backend.pre_tokenizer = split
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_special_tokens(fields))
    _add_bos(backend, fields)
    return backend


def _sentencepiece_merges(
    tokens: list[str], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies.

    Any two tokens whose concatenation is a token may be merged; better scores first.
    Special tokens and bytes are never the result: no text spells them.
    """
    index = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind != _NORMAL:
            continue
        splits = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in index and token[cut:] in index
        ]
        splits.sort(key=lambda pair: (index[pair[0]], index[pair[1]]))
        found += [(score, pair) for pair in splits]
    # Stable: among equal scores the order of the vocabulary stands.
    found.sort(key=lambda entry: -entry[0])
    return [pair for _, pair in found]


def _sentencepiece(fields: Mapping[str, Any]) -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    if fields.get("general.architecture", "").startswith("gemma"):
        raise ValueError(
            "the tokenizer of a Gemma GGUF file is not supported; put the model's "
            "tokenizer.json beside the file."
        )
    tokens = fields["tokenizer.ggml.tokens"]
    scores = fields.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    kinds = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_sentencepiece_merges(tokens, scores, kinds),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="\u2581", prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens(_special_tokens(fields))
    _add_bos(backend, fields)
    return backend
