"""From tokens to text as they arrive: whole characters, and no stop string begun.

A token may end in the middle of a character, and a stop string may be spread over
tokens and accepted blocks. Text is therefore released only when it is certain: complete
UTF-8, and not the beginning of a stop string that the next tokens might complete.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from jaxdec.types import FinishReason


class TextStream:
    """Text of one request, released piece by piece.

    Tokens and text end at one index: the token that completes a stop string is the
    last one kept, and the text ends before the string. Special tokens have no text.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        # Undecodable bytes become U+FFFD, as in the tokenizer's own decoding.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.text = ""
        """All text released so far."""
        self.num_tokens = 0
        """Tokens taken in, up to the one that completed a stop string."""
        self.is_stopped = False
        """Whether a stop string was completed."""

    def push(self, tokens: Iterable[int]) -> str:
        """Takes tokens in; returns the text that has become certain."""
        released = ""
        for token in tokens:
            if self.is_stopped:
                break
            self.num_tokens += 1
            if self._tokenizer.is_special(token):
                continue
            data = self._tokenizer.token_bytes(token)
            released += self._release(self._decoder.decode(data))
        return released

    def take(
        self, tokens: Sequence[int], finish: FinishReason
    ) -> tuple[str, int, FinishReason]:
        """Takes in what a request emitted, and the reason if it ended there.

        Returns:
            The text that has become certain, how many of the tokens are kept, and the
            reason to end: a stop string comes before any other.
        """
        before = self.num_tokens
        # The stop token ends the text and is no part of it.
        is_last = finish == FinishReason.STOP_TOKEN
        text = self.push(tokens[:-1] if is_last else tokens)
        if self.is_stopped:
            return text, self.num_tokens - before, FinishReason.STOP_STRING
        return text, len(tokens), finish

    def finish(self) -> str:
        """Releases what was held back; no more tokens will come.

        Half a character becomes U+FFFD here, and completes no stop string: the request
        has ended already, for another reason.
        """
        if self.is_stopped:
            return ""
        rest = self._held + self._decoder.decode(b"", final=True)
        self.text += rest
        self._held = ""
        return rest

    def _release(self, text: str) -> str:
        self._held += text
        found = [self._held.find(stop) for stop in self._stops]
        hits = [at for at in found if at >= 0]
        if hits:
            self.is_stopped = True
            certain, self._held = self._held[: min(hits)], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
            cut = len(self._held) - keep
            certain, self._held = self._held[:cut], self._held[cut:]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`.

    >>> _overlap("so far<", "<end>"), _overlap("a<e", "<end>"), _overlap("x", "<end>")
    (1, 2, 0)
    """
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
