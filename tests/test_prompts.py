"""The built-in prompts may ship, and a user's file is read or refused by line."""

import collections
import importlib.resources
import json

import pytest

from jaxdec import prompts


def test_builtin_set():
    found = prompts.builtin()
    tasks = collections.Counter(prompt.task for prompt in found)
    assert tasks == {"chat": 8, "math": 8, "code": 8}
    assert len({prompt.id for prompt in found}) == 24
    assert len({prompt.text for prompt in found}) == 24
    assert all(0 < len(prompt.text) <= 400 for prompt in found)
    # Any prefix is a mix.
    assert {prompt.task for prompt in found[:3]} == {"chat", "math", "code"}


def test_licences_and_attribution():
    folder = importlib.resources.files("jaxdec.prompts")
    note = (folder / "ATTRIBUTION.md").read_text(encoding="utf-8")
    licences = {"MIT": "MIT", "Apache-2.0": "Apache-2.0", "CC-BY-4.0": "CC BY 4.0"}
    for prompt in prompts.builtin():
        (line,) = [x for x in note.splitlines() if f"`{prompt.source}` |" in x]
        assert line.endswith(f"| {licences[prompt.licence]} |")
    assert "alpaca" not in (folder / "builtin.jsonl").read_text(encoding="utf-8")


def test_read_text_and_jsonl(tmp_path):
    plain = tmp_path / "prompts.txt"
    plain.write_text("\ufeffone\n\n  two \n", encoding="utf-8")
    assert [p.text for p in prompts.read(plain)] == ["one", "two"]
    lines = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a\u2028b"}, {"prompt": "c", "id": 7, "task": "code"}]
    lines.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
    first, second = prompts.read(lines)
    assert (first.id, first.text, first.task) == ("line-1", "a\u2028b", "user")
    assert (second.id, second.text, second.task) == ("7", "c", "code")


def test_bad_lines_are_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n{oops\n["x"]\n{"prompt": 3}\n{"prompt": " "}')
    with pytest.raises(ValueError, match="4 bad lines") as error:
        prompts.read(file)
    for part in ("line 2: not JSON", "line 3: no text", "line 4: no", "line 5: the"):
        assert part in str(error.value)
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        prompts.read(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        prompts.read(file)
    with pytest.raises(OSError):
        prompts.read(tmp_path / "missing.txt")
