"""Runs strategies side by side on the same prompts, and says which one to use.

Speed and quality are looked at together: a strategy is ranked only if its certificate
says that it decodes what plain decoding would, and only by its time per token against
plain decoding's in the same run. All programs are compiled and warmed up first; then
the strategies take turns on every prompt, so that whatever else the machine does falls
on all of them alike. Requests run one at a time, unless asked otherwise. What the
advice needs besides is measured at the end: how fast the machine reads memory, and what
the best strategy does with a few of the requests at once.

The result is one record (`Comparison.to_dict`, ``report.json``) that keeps the tokens
and the step lists of every request, so that each count in it can be computed again; of
the first few prompts it keeps what was drafted, too.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdec import advice, measure, statistics
from jaxdec.call import Call, check
from jaxdec.certify import certify
from jaxdec.concurrency import run_together
from jaxdec.evidence import Evidence, merge
from jaxdec.io.storage import make_folder
from jaxdec.lm import LM
from jaxdec.planning.bandwidth import plain_floor
from jaxdec.prompts import Prompt
from jaxdec.report.comparison import (
    NOTES,
    NUM_SEEDS,
    Comparison,
    Entry,
    baseline,
    recommend,
)
from jaxdec.report.timeline import NUM_PROMPTS
from jaxdec.report.timeline import record as record_timeline
from jaxdec.sampling import make_sampling_params
from jaxdec.scoring import Scores
from jaxdec.strategies import StrategyConfig, resolve
from jaxdec.text import Outputs, execute

Progress = Callable[[int, int, str], None]
"""Told how many units of work are done, of how many, and what begins now."""

ANY_TEXT = r"(?s)(?=.*\S)[^\ufffd]*"
"""The format that is checked if none is given: some text, and all of it valid."""

TOGETHER = 4
"""Requests that are run at once for the advice on scheduling, at most."""


def compare(
    lm: LM,
    prompts: Sequence[Any],
    strategies: Sequence[str | StrategyConfig],
    *,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    seed: int = 0,
    draft_length: int | None = None,
    repeats: int = 1,
    batch_size: int = 1,
    certify: bool = True,
    out: str | Path | None = None,
    progress: Progress | None = None,
    exact: bool | int = False,
    output_format: str | None = None,
    **sampling: Any,
) -> Comparison:
    """Runs every strategy on the same prompts.

    Args:
        lm: from `jaxdec.load`.
        prompts: texts, `jaxdec.prompts.Prompt`, or anything that `jaxdec.generate`
            takes as one prompt.
        strategies: names or configurations. Greedy decoding is always run, as the
            baseline; so is ``sample`` where drafts are made at a temperature above 0.
        max_new_tokens: of each request, at least 2.
        temperature: of all strategies but greedy (always 0) and, where it is 0,
            ``sample`` (then 0.7).
        seed: of the first request; every next one has the next number, since the
            distribution test of a certificate needs independent requests.
        draft_length: K of all strategies that draft.
        repeats: times that each request is run; the run of median length counts.
        batch_size: requests that are run together. More are quicker to measure, but
            times per token are then those of a batch.
        certify: whether to draw up a certificate of each strategy. Without one no
            strategy is ranked.
        out: folder for the report (see `Comparison.save`).
        progress: told how far it is.
        exact: see `jaxdec.generate`.
        output_format: see `jaxdec.generate`; any text if None.
        **sampling: further options of `jaxdec.generate`.

    Raises:
        ValueError: bad input, before any model call; or no output with a second step,
            so that there is no time per token.
    """
    entries = plan(strategies, temperature, draft_length, lm)
    items = [_item(prompt, number) for number, prompt in enumerate(prompts, start=1)]
    if not items:
        raise ValueError("no prompts to compare on; give at least one")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 2:
        raise ValueError(
            "a comparison times the tokens after the first, so max_new_tokens must be "
            f"a whole number of at least 2, got {max_new_tokens!r}"
        )
    for name, value in (("repeats", repeats), ("batch_size", batch_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    groups = [items[i : i + batch_size] for i in range(0, len(items), batch_size)]
    options = {"max_new_tokens": max_new_tokens, "exact": exact, **sampling}

    def checked(entry, number, capacity=0):
        group = groups[number]
        return check(
            lm,
            [content for _, content in group],
            strategy=entry.config,
            temperature=entry.temperature,
            seed=[_seed(seed, batch_size * number + row) for row in range(len(group))],
            output_format=ANY_TEXT if output_format is None else output_format,
            capacity=capacity,
            **options,
        )

    order = range(len(groups))
    # A smaller cache is read faster, so it is the same for all.
    capacity = max(checked(e, i).key.capacity for e in entries for i in order)
    calls = {e.label: [checked(e, i, capacity) for i in order] for e in entries}
    if out is not None:
        make_folder(out)
    seeds = [_seed(seed, i) for i in range(1, NUM_SEEDS)]
    num_sampled = sum(entry.temperature > 0 for entry in entries)
    step = _Steps(
        progress,
        total=len(entries) * (2 + certify + repeats * len(groups))
        + 1
        + num_sampled * len(seeds),
    )

    for entry in entries:
        step(f"compiling {entry.label}")
        _warm_up(lm, calls[entry.label])
    runs = _take_turns(calls, repeats, step)
    chosen = {
        label: [sorted(r, key=_seconds)[(repeats - 1) // 2] for r in found]
        for label, found in runs.items()
    }
    first = {
        label: [[out.tokens for out in found[0]] for found in groups_of]
        for label, groups_of in runs.items()
    }
    evidence, scores = {}, {}
    for entry in entries:
        step(f"measuring the costs of {entry.label}")
        record = _evidence(lm, chosen[entry.label], first[entry.reference], scores)
        outputs = [chosen[entry.label][0][0].tokens]
        if entry.temperature > 0:
            for other in seeds:
                step(f"{entry.label} with seed {other}")
                call = check(
                    lm,
                    items[0][1],
                    strategy=entry.config,
                    temperature=entry.temperature,
                    seed=other,
                    single=True,
                    capacity=capacity,
                    **options,
                )
                outputs.append(execute(call)[0].tokens)
        evidence[entry.label] = dataclasses.replace(
            record, distinct_outputs=statistics.distinct_outputs(outputs)
        )
    certificates = {}
    for entry in entries if certify else ():
        step(f"certifying {entry.label}")
        certificates[entry.label] = _certificate(
            lm,
            [content for _, content in items],
            entry.config,
            temperature=entry.temperature,
            seed=seed,
            outputs=chosen[entry.label],
            progress=step.say,
            **options,
        )
    for entry in entries if certify else ():
        evidence[entry.label] = dataclasses.replace(
            evidence[entry.label],
            exact_match=certificates[entry.label].share_that_match(
                [out.tokens for found in chosen[entry.label] for out in found],
                [tokens for found in first[entry.reference] for tokens in found],
            ),
        )
    best = recommend(entries, evidence, certificates).best
    step(f"running requests at once: {best}")
    used = next(entry for entry in entries if entry.label == best)
    together = run_together(
        lm,
        [content for _, content in items[:TOGETHER]],
        used.config,
        label=best,
        temperature=used.temperature,
        seeds=[_seed(seed, row) for row in range(len(items))],
        **options,
    )
    plain = evidence[baseline(entries)]
    floor = plain_floor(lm.config, lm.params, plain.kv_bytes_read / plain.num_steps)
    comparison = Comparison(
        model=_model(lm),
        settings={
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "draft_length": draft_length,
            "repeats": repeats,
            "batch_size": batch_size,
            "exact": exact,
            "output_format": output_format,
            "prompts": [
                about | ({"prompt": _shown(content)} if i < NUM_PROMPTS else {})
                for i, (about, content) in enumerate(items)
            ],
            "prompts_sha256": _digest([content for _, content in items]),
            "device": measure.versions()["device"],
            "num_cpus": os.cpu_count(),
            "notes": list(NOTES),
        },
        entries=tuple(entries),
        evidence=evidence,
        certificates=certificates,
        advice=recommend(
            entries, evidence, certificates, floor=floor, together=together
        ),
        floor=floor,
        together=together,
        requests={
            label: tuple(
                {**about, **said}
                for (about, _), said in zip(items, _said(lm, found), strict=True)
            )
            for label, found in chosen.items()
        },
    )
    if out is not None:
        comparison.save(out)
    step("done")
    return comparison


def plan(
    strategies: Sequence[str | StrategyConfig],
    temperature: float,
    draft_length: int | None = None,
    lm: LM | None = None,
) -> list[Entry]:
    """What a comparison runs: the strategies asked for, and their plain decoding.

    Raises:
        ValueError: an unknown strategy, a temperature below 0, one strategy twice.
    """
    make_sampling_params(1, temperature=temperature)
    configs = []
    for strategy in strategies:
        config = resolve(strategy, lm=lm)
        if draft_length is not None and config.length:
            config = config.with_length(draft_length)
        configs.append(config)
    plain = [resolve("greedy")]
    if temperature > 0 and any(config.length for config in configs):
        plain.append(resolve("sample"))
    configs = [c for c in plain if c not in configs] + configs
    names = [config.name for config in configs]
    entries = []
    for config in configs:
        own = temperature
        if config.name == advice.GREEDY:
            own = 0.0
        elif config.name == "sample" and temperature == 0:
            own = config.default_temperature
        label = config.name
        if names.count(label) > 1:
            label = f"{label}-{config.length}"
        entries.append(
            Entry(
                label=label,
                config=config,
                temperature=float(own),
                reference=advice.GREEDY if own == 0 else "sample",
            )
        )
    labels = [entry.label for entry in entries]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ValueError(
            f"{', '.join(twice)} would be in the comparison twice; name each strategy "
            "once, or give it different draft lengths"
        )
    return entries


class _Steps:
    """Counts units of work for a progress bar."""

    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, text: str) -> None:
        self.say(text)
        self.done += 1

    def say(self, text: str) -> None:
        """Tells more about the unit that is under way."""
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, text)


def _item(prompt: Any, number: int) -> tuple[dict[str, str], Any]:
    """What the report says about a prompt, and its content."""
    if isinstance(prompt, Prompt):
        return {"prompt_id": prompt.id, "task": prompt.task}, prompt.text
    return {"prompt_id": f"prompt-{number}", "task": "user"}, prompt


def _shown(content: Any) -> str:
    """A prompt as text: token ids and conversations as JSON."""
    if isinstance(content, str):
        return content
    return json.dumps(content, default=str, ensure_ascii=False)


def _digest(contents: Sequence[Any]) -> str:
    text = json.dumps(contents, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _seed(first: int, number: int) -> int:
    """The seed that lies `number` after the first, within the range of seeds."""
    if not isinstance(first, int) or not 0 <= first < 2**32:
        raise ValueError(
            f"a seed is a whole number from 0 to 2**32 - 1, got {first!r}; pass one, "
            "and every request is given its own"
        )
    return (first + number) % 2**32


def _warm_up(lm: LM, calls: Sequence[Call]) -> None:
    """Compiles what the calls need, and runs each program once."""
    for call in {call.key: call for call in calls}.values():
        program, _ = lm.program(call.key)
        program.run(program.prefill(program.params, call.request), 2)


def _take_turns(
    calls: Mapping[str, Sequence[Call]], repeats: int, step: _Steps
) -> dict[str, list[list[Outputs]]]:
    """Every repeat of every call, by label and place."""
    num_calls = len(next(iter(calls.values())))
    runs = {label: [[] for _ in range(num_calls)] for label in calls}
    for _ in range(repeats):
        for i in range(num_calls):
            for label in calls:
                step(f"prompt {i + 1} of {num_calls}: {label}")
                runs[label][i].append(execute(calls[label][i]))
    return runs


def _seconds(outputs: Outputs) -> float:
    return outputs.run.e2e_s


def _evidence(
    lm: LM, runs: Sequence[Outputs], references: Sequence[Any], scores: Scores
) -> Evidence:
    """One record of all requests of a strategy, with its compilations."""
    merged = merge(
        [
            measure.evidence(
                outputs.run, outputs.items, references=found, scores=scores
            )
            for outputs, found in zip(runs, references, strict=True)
        ]
    )
    programs = [lm.program(key)[0] for key in {o.run.call.key: None for o in runs}]
    return dataclasses.replace(
        merged,
        compile_s=sum(program.compile_s for program in programs),
        num_compilations=sum(program.num_compilations for program in programs),
    )


def _said(lm: LM, runs: Sequence[Outputs]) -> Iterator[dict[str, Any]]:
    """What the report adds to each request: its text, of the first also its steps."""
    answers = ((outputs, row) for outputs in runs for row in range(len(outputs)))
    for number, (outputs, row) in enumerate(answers):
        answer = outputs[row]
        more = {"text": answer.text}
        if number < NUM_PROMPTS:
            more["timeline"] = record_timeline(
                lm.tokenizer, answer.tokens, outputs.run.info, row
            )
        yield more


def _certificate(lm: LM, prompts: Sequence[Any], *args: Any, **options: Any):
    """Out of `compare`, where the name `certify` is an option."""
    return certify(lm, prompts, *args, **options)


def _model(lm: LM) -> dict[str, Any]:
    return {
        "name": lm.name,
        "family": lm.config.family,
        "num_params": lm.num_params,
        "num_layers": lm.config.num_layers,
        "vocab_size": lm.config.vocab_size,
        "dtype": lm.dtype,
        "cache_dtype": lm.cache_dtype,
        "content_hash": lm.content_hash,
    }
