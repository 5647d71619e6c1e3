"""The subcommand `jaxdec show`: an answer as it is decoded, coloured by origin.

A step at a time: accepted draft tokens, corrections and bonus tokens (see
`jaxdec.counts`) in different colours on a terminal, in different brackets elsewhere and
where NO_COLOR is set. The text is what `jaxdec generate` prints.
"""

import collections
from collections.abc import Iterator
from typing import Any

import rich.console
import rich.live
import rich.text

from jaxdec import console as terminal
from jaxdec import options
from jaxdec.detokenize import TextStream

STYLES = {
    "accepted": "bold green",
    "correction": "bold yellow",
    "bonus": "bold blue",
    "plain": "",
}
BRACKETS = {
    "accepted": ("[", "]"),
    "correction": ("{", "}"),
    "bonus": ("<", ">"),
    "plain": ("", ""),
}
WORDS = {
    "accepted": "accepted draft",
    "correction": "correction",
    "bonus": "bonus",
    "plain": "plain",
}
MARGIN = 3
"""Lines of a terminal that are left free while an answer grows."""


def show(
    prompt: options.Prompt,
    model: options.Model = "smollm2",
    strategy: options.Strategy = "lookup",
    drafter: options.Drafter = None,
    draft_model: options.DraftModel = None,
    draft_length: options.DraftLength = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    dtype: options.Dtype = "bfloat16",
    chat: options.Chat = None,
    system: options.System = None,
    exact: options.Exact = False,
) -> None:
    """Watch an answer being decoded: which tokens were drafted, which corrected."""
    lm, prompt, asked = options.prepare(
        prompt,
        model=model,
        strategy=strategy,
        drafter=drafter,
        draft_model=draft_model,
        draft_length=draft_length,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
        chat=chat,
        system=system,
        exact=exact,
    )
    import jaxdec
    from jaxdec import measure

    stream = Coloured(jaxdec.stream(lm, prompt, segment=1, **asked), lm.tokenizer)
    console = rich.console.Console(highlight=False)
    watch(stream, console)
    outputs = stream.outputs
    if outputs.run is None:
        return
    errors = terminal.errors()
    errors.print(legend(stream.counts, has_colours(console)), soft_wrap=True)
    evidence = measure.evidence(outputs.run, outputs.items, with_costs=False)
    errors.print(
        terminal.summary(asked["strategy"].name, evidence), style="dim", soft_wrap=True
    )


class Coloured:
    """Iterates over what a stream with ``segment=1`` says, by origin.

    Every item is a list of ``(text, origin)``, one for each token: what became certain
    in one step. Text may become certain later than its token (in the middle of a
    character, or where a stop string might begin); it keeps its token's origin.
    """

    def __init__(self, pieces: Iterator[Any], tokenizer: Any):
        self._pieces = pieces
        self._tokenizer = tokenizer
        self.counts: collections.Counter[str] = collections.Counter()
        """Tokens so far, by origin."""
        self.num_steps = 0
        self.num_last = 0
        """Tokens of the last step."""
        self.outputs: Any = None
        """What `jaxdec.generate` would have returned, at the end."""

    def __iter__(self) -> Iterator[list[tuple[str, str]]]:
        own = TextStream(self._tokenizer)
        waiting: collections.deque[tuple[int, str]] = collections.deque()
        while True:
            try:
                piece = next(self._pieces)
            except StopIteration as end:
                self.outputs = end.value
                return
            if piece.finish_reason is None:
                self.num_steps += 1
                self.num_last = len(piece.tokens)
            self.counts.update(piece.origins)
            for token, origin in zip(piece.tokens, piece.origins, strict=True):
                waiting.append((len(own.push([token])), origin))
            yield list(_parts(piece.text, waiting))


def _parts(
    text: str, waiting: collections.deque[tuple[int, str]]
) -> Iterator[tuple[str, str]]:
    """Cuts a text by how many characters each token has, and takes these away."""
    origin = "plain"
    while text and waiting:
        size, origin = waiting.popleft()
        if size > len(text):
            waiting.appendleft((size - len(text), origin))
        if size:
            yield text[:size], origin
        text = text[size:]
    if text:
        # Half a character, at the end: no token completes it.
        yield text, origin


def watch(stream: Coloured, console: rich.console.Console) -> None:
    """Prints a stream as it comes.

    On a terminal with colours, the last lines of the answer stand above a line that
    counts; at the end the whole answer takes their place.
    """
    if not has_colours(console):
        for parts in stream:
            for text, origin in parts:
                before, after = BRACKETS[origin]
                console.file.write(f"{before}{text}{after}")
            console.file.flush()
        console.file.write("\n")
        return
    answer = rich.text.Text()
    try:
        with rich.live.Live(
            console=console, transient=True, auto_refresh=False
        ) as live:
            for parts in stream:
                for text, origin in parts:
                    answer.append(text, STYLES[origin])
                lines = answer.wrap(console, console.width)
                shown = lines[-max(1, console.height - MARGIN) :]
                live.update(rich.console.Group(*shown, status(stream)), refresh=True)
    finally:
        # What there is, also when it is interrupted.
        if answer or stream.outputs is not None:
            console.print(answer, soft_wrap=True)


def status(stream: Coloured) -> rich.text.Text:
    """One line while an answer grows."""
    num, steps = stream.counts.total(), stream.num_steps
    return rich.text.Text(
        f"step {steps} gave {stream.num_last}: {num} tokens, "
        f"{num / max(steps, 1):.2f} a step",
        style="dim",
        no_wrap=True,
        overflow="ellipsis",
    )


def legend(counts: collections.Counter[str], is_coloured: bool) -> rich.text.Text:
    """What the colours or brackets mean, and how many tokens of each there were."""
    line = rich.text.Text()
    for origin, words in WORDS.items():
        before, after = ("", "") if is_coloured else BRACKETS[origin]
        style = STYLES[origin] if is_coloured else ""
        line.append("  " if line else "")
        line.append(f"{before}{words}{after}", style)
        line.append(f" {counts[origin]}")
    return line


def has_colours(console: rich.console.Console) -> bool:
    """Whether origins can be told by colour: a terminal, and no NO_COLOR."""
    is_plain = console.no_color or console.is_dumb_terminal
    return console.is_terminal and not is_plain
