"""Says what a path holds: a language model, a drafter, or both in one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxdec.io.cache import open_checkpoint
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.look import look
from jaxdec.io.drafters.own import is_own, read_own
from jaxdec.io.drafters.read import StoredDrafter, open_drafter, says_drafter
from jaxdec.io.hub import resolve
from jaxdec.io.safetensors import read_json
from jaxdec.loaded_drafter import check_tokenizer
from jaxdec.report.checkpoints import describe, describe_drafter, describe_native

HASH_DIGITS = 16
"""Of a hash, those that a person is shown."""
_MISSED = ("tokenizer", "stop tokens")
"""What a person would look for, so that its absence is told."""


def inspect(
    name: str,
    target: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The facts of a model or a drafter, as JSON values.

    Args:
        name: a folder, a ``.gguf`` file, a built-in name or a Hub id.
        target: of a drafter: the model it is for; their pairing is checked.
        progress: told when something slow begins.

    Raises:
        CheckpointError: it cannot be opened, is not whole or not supported, or does
            not fit the target.
    """
    path = resolve(name, progress, "model or drafter")
    if path.is_dir() and is_own(path):
        found = None if target is None else open_checkpoint(target, progress)
        config, content = (found.config, found.content_hash) if found else (None, "")
        checkpoint, card = read_own(path, config, content)
        facts = describe_drafter(
            checkpoint, name, content_hash=str(card.get("hash", "")), target=config
        )
        facts |= {"card": card}
        return facts if target is None else facts | {"fits": target}
    stored = _drafter_in(path, is_expected=target is not None)
    if stored is not None:
        return _inspect_drafter(stored, name, target, progress)
    if target is not None:
        raise CheckpointError(
            f"{name} is a whole model and no drafter, so a target has no meaning; "
            "leave it out"
        )
    checkpoint = open_checkpoint(path, progress)
    return describe(checkpoint) | describe_native(checkpoint)


def _inspect_drafter(
    stored: StoredDrafter,
    name: str,
    target: str | None,
    progress: Callable[[str], None] | None,
) -> dict[str, Any]:
    config = None
    if target is not None:
        checkpoint = open_checkpoint(target, progress)
        check_tokenizer(stored.folder, checkpoint)
        config = checkpoint.config
    facts = describe_drafter(
        look(stored, config),
        name,
        content_hash=stored.content_hash,
        made_for=stored.made_for,
        target=config,
    )
    return facts if target is None else facts | {"fits": target}


def _drafter_in(path: Path, *, is_expected: bool) -> StoredDrafter | None:
    """The drafter in a folder; None if it is a model, or part of one.

    Whatever is wrong with a folder is told once: as a fault of the drafter if it says
    that it is one (or is expected to be), of the model otherwise.
    """
    if not path.is_dir() or not (path / "config.json").exists():
        return None
    is_expected = is_expected or says_drafter(read_json(path / "config.json"))
    try:
        stored = open_drafter(path)
    except CheckpointError:
        if is_expected:
            raise
        return None
    if stored.family != "mtp" or "speculators_model_type" in stored.values:
        return stored
    try:
        open_checkpoint(path)
    except CheckpointError:
        return stored  # Its model is of a kind that cannot be loaded.
    return None


def rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts for people: a name and a text each; what does not apply is left out.

    >>> rows({"layers": 12, "experts": None, "choices": {"bias": "not given, ..."}})
    [('layers', '12'), ('left open', 'bias: not given, ...')]
    """
    found: list[tuple[str, str]] = []
    # The taps stand in words beside their numbers.
    for name, value in facts.items():
        is_known = name == "name in the file" and value == facts["name"]
        if name.endswith("taps") or name == "fits" or is_known:
            continue
        if value in (None, "", [], {}):
            if name in _MISSED:
                found.append((name, "none"))
            continue
        if name.endswith("choices"):
            lines = [f"{key}: {text}" for key, text in value.items()]
            name = name.replace("choices", "left open")
            found += [(name if i == 0 else "", x) for i, x in enumerate(lines)]
        else:
            found.append((name, _plain(name, value)))
    return found


def _plain(name: str, value: Any) -> str:
    if name == "hash":
        return f"{value[:HASH_DIGITS]}..."
    if name == "stored as" and isinstance(value, dict):
        counts = sorted(value.items(), key=lambda item: -item[1])
        (kind, num), *others = counts
        first = f"{kind} in {num} tensor{'' if num == 1 else 's'}"
        return ", ".join([first, *(f"{kind} in {num}" for kind, num in others)])
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    # An id is no quantity.
    is_count = isinstance(value, int) and name != "mask token"
    return f"{value:,}" if is_count else str(value)
