"""What a drafter is, in words: the same words for every format.

Facts are for people; `jaxdec inspect` shows them as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MAX_NAMED = 3
"""Layers of a kind that are told by number; of more, only how many there are."""


def owner(is_own: bool) -> str:
    """Whose a table is."""
    return "its own" if is_own else "the target's"


def not_given(taken: Any, *, because: str = "", override: str = "") -> str:
    """What was taken where a file leaves something open.

    >>> not_given(True, override="bias")
    'not given, taken as true; override with bias=...'
    >>> not_given((2, 5, 8), because="low, middle and high")
    'not given, taken as 2, 5, 8 (low, middle and high)'

    Args:
        taken: the value.
        because: whose default it is, or what it follows from.
        override: the option of `jaxdec.load_drafter` that says otherwise.
    """
    if isinstance(taken, bool):
        taken = str(taken).lower()
    elif isinstance(taken, list | tuple):
        taken = ", ".join(map(str, taken))
    reason = f" ({because})" if because else ""
    hint = f"; override with {override}=..." if override else ""
    return f"not given, taken as {taken}{reason}{hint}"


def class_defaults(taken: Mapping[str, Any]) -> dict[str, str]:
    """The choice of a configuration that leaves out defaults of its class.

    >>> class_defaults({"vocab_size": 32000, "hidden_size": 4096})["layers"]
    'not given, taken from their class: vocab_size=32000, hidden_size=4096'
    """
    if not taken:
        return {}
    pairs = ", ".join(f"{name}={value}" for name, value in taken.items())
    return {"layers": f"not given, taken from their class: {pairs}"}


def attention(windows: Sequence[int | None]) -> str:
    """What layers see, given the window of each; empty is no windows.

    >>> attention((7, None))
    'the last 7 tokens in layer 0; all earlier tokens in layer 1'
    >>> attention((7, 7)), attention(())
    ('the last 7 tokens', 'all earlier tokens')
    """

    def seen(window):
        return "all earlier tokens" if window is None else f"the last {window} tokens"

    return by_layer([seen(window) for window in windows] or [seen(None)])


def by_layer(words: Sequence[str]) -> str:
    """What holds of each layer, layers of a kind together.

    >>> by_layer(["near", "near", "near", "near", "far"])
    'near in 4 of 5 layers; far in layer 4'
    """
    kinds = list(dict.fromkeys(words))
    if len(kinds) == 1:
        return kinds[0]
    places = [[i for i, word in enumerate(words) if word == kind] for kind in kinds]
    return "; ".join(
        f"{kind} in {name_layers(place)}"
        if len(place) <= MAX_NAMED
        else f"{kind} in {len(place)} of {len(words)} layers"
        for kind, place in zip(kinds, places, strict=True)
    )


def name_layers(numbers: Sequence[int]) -> str:
    """Layers by number.

    >>> name_layers([2]), name_layers([0, 1, 4])
    ('layer 2', 'layers 0, 1 and 4')
    """
    *most, last = map(str, numbers)
    return f"layers {', '.join(most)} and {last}" if most else f"layer {last}"
