"""Prompts to compare strategies on: a small built-in set, and a reader for your own.

The built-in set is 24 short prompts of chat, math and code in turn, so that any prefix
is a mix; several ask for text that is already in the prompt, where lookup pays. All are
under licences that allow them to ship here; ``ATTRIBUTION.md`` beside this file names
the authors.
"""

import dataclasses
import importlib.resources
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, and where it is from."""

    id: str
    text: str
    task: str = "user"
    """``chat``, ``math`` or ``code``; ``user`` if nobody says."""
    source: str = ""
    licence: str = ""


def builtin() -> list[Prompt]:
    """The prompts that ship with the package."""
    file = importlib.resources.files(__name__) / "builtin.jsonl"
    return _from_lines(file.read_text(encoding="utf-8"), "builtin.jsonl", is_json=True)


def read(path: str | Path) -> list[Prompt]:
    """Reads prompts from a file.

    Args:
        path: ``.jsonl``: one object a line with ``"prompt"`` (and, if you like, ``id``,
            ``task``, ``source``, ``licence``). Any other name: one prompt a line. Empty
            lines are skipped.

    Raises:
        ValueError: Lines that hold no prompt, all of them by number; or no line at all.
        OSError: The file cannot be read; the message says which, and what to do.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise type(error)(
            f"the prompts in {str(path)!r} cannot be read: {_why(error)}; give a file "
            "with a prompt a line, or leave it out to use the built-in ones"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    return _from_lines(text, str(path), is_json=path.suffix == ".jsonl")


def _why(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error)


def _from_lines(text: str, where: str, is_json: bool) -> list[Prompt]:
    found, bad = [], []
    # Only line feeds end a line: JSON text may hold other separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if not is_json:
            found.append(Prompt(id=f"line-{number}", text=line.strip()))
            continue
        try:
            found.append(_from_json(line, number))
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    if bad:
        raise ValueError(
            f"{where} has {len(bad)} bad lines ({'; '.join(bad)}); write one object a "
            'line, such as {"prompt": "Why is the sky blue?"}'
        )
    if not found:
        raise ValueError(f"{where} holds no prompts; write one a line")
    return found


def _from_json(line: str, number: int) -> Prompt:
    try:
        values = json.loads(line)
    except ValueError:
        raise ValueError("not JSON") from None
    if not isinstance(values, dict) or not isinstance(values.get("prompt"), str):
        raise ValueError('no text under "prompt"')
    if not values["prompt"].strip():
        raise ValueError("the prompt is empty")
    return Prompt(
        id=str(values.get("id", f"line-{number}")),
        text=values["prompt"],
        task=str(values.get("task", "user")),
        source=str(values.get("source", "")),
        licence=str(values.get("licence", "")),
    )
