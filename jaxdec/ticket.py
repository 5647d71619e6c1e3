"""A request of a server, from where its caller stands.

Between steps a ticket shows what was said so far; its text is what is certain: complete
characters, and never the beginning of a stop string.
"""

import collections
from collections.abc import Callable
from typing import Any

from jaxdec.call import Call
from jaxdec.detokenize import TextStream
from jaxdec.latency import Record
from jaxdec.lm import LM
from jaxdec.serving_loop import Served
from jaxdec.text import Generated, Piece
from jaxdec.types import FinishReason


class Ticket:
    """A request of a server: what it said so far, and when."""

    def __init__(self, lm: LM, call: Call, on_piece: Callable[[Piece], Any] | None):
        self._text = TextStream(lm.tokenizer, call.stop_strings[0])
        self._is_text = lm.tokenizer is not None
        self._on_piece = on_piece
        self._served: Served | None = None
        self.pieces: collections.deque[Piece] = collections.deque()
        """Pieces that no stream has yielded yet."""
        self._unheard: collections.deque[Piece] = collections.deque()

    @property
    def id(self) -> int:
        """The number of the request."""
        return self.record.id

    @property
    def record(self) -> Record:
        """When things happened, on the clock of the server."""
        return self.served.record

    @property
    def served(self) -> Served:
        """See `serving_loop.Served`."""
        assert self._served is not None
        return self._served

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.record.is_done

    @property
    def tokens(self) -> tuple[int, ...]:
        """What it said so far."""
        return tuple(self.served.tokens)

    @property
    def text(self) -> str:
        """The text that is certain so far."""
        return self._text.text

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None while it has not."""
        return self.record.finish.label if self.is_done else None

    @property
    def error(self) -> BaseException | None:
        """What its callback raised, or what ended a round in the middle.

        The request was cancelled for it.
        """
        return self.served.error

    @property
    def generated(self) -> Generated:
        """The answer as `jaxdec.generate` gives it, as far as it goes."""
        is_stop = self.record.finish == FinishReason.STOP_TOKEN
        return Generated(
            text=self.text,
            tokens=self.tokens,
            finish_reason=self.record.finish.label,
            stop_token=self.tokens[-1] if is_stop else None,
        )

    def take(self, tokens: list[int], finish: FinishReason) -> tuple[int, FinishReason]:
        """Takes what a step said; see `serving_loop.Client`."""
        text, num = "", len(tokens)
        if self._is_text:
            text, num, finish = self._text.take(tokens, finish)
        is_last = finish != FinishReason.NONE
        if is_last and self._is_text:
            text += self._text.finish()
        piece = Piece(
            text=text,
            tokens=tuple(tokens[:num]),
            finish_reason=finish.label if is_last else None,
        )
        self.pieces.append(piece)
        self._unheard.append(piece)
        return num, finish

    def notify(self) -> None:
        """Tells the caller; whatever that raises is the request's own affair."""
        while self._unheard:
            piece = self._unheard.popleft()
            if self._on_piece is not None:
                self._on_piece(piece)

    def bind(self, served: Served) -> None:
        """See `serving_loop.Client`."""
        self._served = served
