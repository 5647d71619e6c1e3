"""A load test: the same load on a real server and on the simulated clock.

    profile   what the server's work takes and what becomes of drafts, measured
    serve     the load on the real server, in real time
    imitate   the load on the simulated clock, with the profile
    sweep     many loads on the simulated clock, as plain, fixed and scheduled drafting

A profile can be kept, so that loads which no machine at hand carries (many replicas,
thousands of requests per second) can be looked at without a model.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdec import speculation
from jaxdec.call import check
from jaxdec.counts import Number
from jaxdec.decoding import PREFILL_CHUNK
from jaxdec.latency import Latency, Objective, Record, span, summarise
from jaxdec.policies import Limits, check_fits, find_policy
from jaxdec.scheduling import token_gap_bound
from jaxdec.server import Server
from jaxdec.serving_costs import Profile
from jaxdec.simulation import Arrival, simulate
from jaxdec.speculation import Acceptance
from jaxdec.strategies import resolve
from jaxdec.traffic import Traffic, drive, prompts_of
from jaxdec.trained import TrainedConfig

SPECULATION = ("scheduled", "fixed", "off")
COMPARED = (
    "queue_wait_ms",
    "ttft_ms",
    "tpot_ms",
    "p50_token_gap_ms",
    "p99_token_gap_ms",
    "throughput_tokens_per_s",
)
"""Figures whose ratio, real to simulated, is reported."""
NUM_PROBES = 16  # Requests that acceptance is measured on.
MOST_SWEPT = 20_000  # Requests of one point of a sweep.

Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What is served, and how."""

    traffic: Traffic
    policies: tuple[str, ...] = ("first_come",)
    num_slots: int = 8
    prefill_chunk: int = PREFILL_CHUNK
    preemption: str = "none"
    kv_tokens: int | None = None
    speculation: str = "scheduled"
    objective: Objective = Objective()
    temperature: float | None = None

    def __post_init__(self):
        if not self.policies:
            raise ValueError("there is no policy to test; name one or more")
        if len(set(self.policies)) < len(self.policies):
            raise ValueError(
                f"policies are {', '.join(self.policies)}; name each of them once"
            )
        if not all(limit > 0 for limit in self.objective):
            raise ValueError(
                f"an objective is times above 0, got {self.objective}; leave out what "
                "is not to be kept"
            )
        for name in self.policies:
            find_policy(name)
        if self.speculation not in SPECULATION:
            raise ValueError(
                f"speculation must be one of {', '.join(SPECULATION)}, got "
                f"{self.speculation!r}"
            )
        assert self.limits.num_slots

    @property
    def limits(self) -> Limits:
        """Of every device."""
        return Limits(
            num_slots=self.num_slots,
            row_tokens=self.traffic.max_length,
            chunk=self.prefill_chunk,
            kv_tokens=self.kv_tokens,
            preemption=self.preemption,
            max_kept=self.num_slots,
        )

    def draw(self) -> tuple[Arrival, ...]:
        """The load; every request of it could run.

        Raises:
            ValueError: one could not.
        """
        arrivals = self.traffic.draw()
        for arrival in arrivals:
            check_fits(self.limits, arrival.prompt_length, arrival.output_length)
        return arrivals

    def server(self, lm: Any, strategy: Any, policy: str) -> Server:
        """A server of this setup.

        Raises:
            ValueError: options that make no sense together, before anything runs.
        """
        check(
            lm, [0], strategy=strategy, max_new_tokens=0, temperature=self.temperature
        )
        return Server(
            lm,
            strategy,
            num_slots=self.num_slots,
            max_length=self.traffic.max_length,
            policy=policy,
            preemption=self.preemption,
            kv_tokens=self.kv_tokens,
            prefill_chunk=self.prefill_chunk,
            max_shared=0,  # Simulated prompts are lengths.
        )


def config_of(strategy: Any, setup: Setup, profile: Profile | None = None) -> Any:
    """A strategy as this setup serves it.

    It gets widths, so that shorter drafts cost less, and all kinds of speculation run
    the same program. Where drafts are scheduled, and costs were measured, a drafter
    with a confidence gets the rates of its steps.
    """
    config = strategy.with_widths()
    if setup.speculation != "scheduled" or profile is None:
        return config
    if not isinstance(config, TrainedConfig) or not config.draft.has_confidence:
        return config
    if config.threshold is not None or config.steps_per_second:
        return config  # It was told how to limit drafts.
    rates = speculation.steps_per_second(profile.costs, setup.num_slots, config.length)
    return dataclasses.replace(config, steps_per_second=rates)


def run(
    setup: Setup,
    *,
    lm: Any = None,
    strategy: Any = None,
    profile: Profile | None = None,
    rates: Sequence[Number] = (),
    num_replicas: int = 1,
    route: str = "least_loaded",
    progress: Progress = lambda *_: None,
) -> tuple[dict[str, Any], Profile]:
    """A whole load test.

    Args:
        setup: what is served, and how.
        lm: the model; None serves on the simulated clock alone.
        strategy: a configuration, from `jaxdec.strategies.resolve`.
        profile: what was measured before; None measures it now, which takes a model.
        rates: loads of a sweep on the simulated clock, in requests per second.
        num_replicas: of the simulated clock; where a model serves, of the sweep alone,
            since what is held against a server is one.
        route: of the simulated clock.
        progress: called with what is done, all, and words.

    Returns:
        The report, as JSON values, and the profile. In the report, figures of all
        policies together; ``policies``: of each, from the real clock if there is a
        model, with ``simulated`` and their ratio ``agreement`` beside it.

    Raises:
        ValueError: neither a model nor a profile, or a setup that makes no sense.
    """
    if profile is None:
        if lm is None:
            raise ValueError(
                "a load test needs a model, or the profile of one; give --model, or "
                "--profile FILE"
            )
        profile = measure(lm, strategy, setup, progress)
    bound, why = bound_ms(profile)
    runs, found = [], {}
    for name in setup.policies:
        simulated = imitate(
            setup,
            profile,
            name,
            num_replicas=num_replicas if lm is None else 1,
            route=route,
            progress=progress,
        )
        records = simulated
        if lm is not None:
            records = serve(lm, strategy, setup, profile, name, progress)
        runs.append(records)
        found[name] = figures([records], setup.objective, bound)
        if lm is not None:
            other = figures([simulated], setup.objective, bound)
            found[name] |= {
                "simulated": other,
                "agreement": agreement(found[name], other),
            }
        found[name]["timeline"] = timeline(records)
    lengths = speculation.best_lengths(profile.costs, profile.acceptance)
    report = figures(runs, setup.objective, bound) | {
        "policies": found,
        "sweep": sweep(
            setup,
            profile,
            rates,
            num_replicas=num_replicas,
            route=route,
            progress=progress,
        ),
        "profile": profile.to_dict(),
        "scheduled_draft_lengths": list(lengths),
        "notes": [] if why is None else [why],
        "settings": {
            "clock": "simulated" if lm is None else "real",
            "num_replicas": num_replicas,
            "route": route,
            **_plain(dataclasses.asdict(setup)),
        },
    }
    return report, profile


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON values: no limit is None."""
    objective = Objective(*values["objective"])._asdict()
    return values | {
        "objective": {k: v if math.isfinite(v) else None for k, v in objective.items()},
        "policies": list(values["policies"]),
    }


def measure(
    lm: Any, strategy: Any, setup: Setup, progress: Progress = lambda *_: None
) -> Profile:
    """Times a server of this setup in the middle of typical requests.

    Acceptance is measured on the first requests of the load, all at once.
    """
    config = config_of(strategy, setup)
    server = setup.server(lm, config, "first_come")
    arrivals = setup.draw()
    tokens = sum(a.prompt_length + a.output_length / 2 for a in arrivals)
    context = round(tokens / len(arrivals))
    costs = server.measure_costs(context, progress=progress)
    acceptance, plain = Acceptance(), None
    if config.length:
        alone = setup.server(lm, resolve("greedy"), "first_come")
        plain = alone.measure_costs(context, progress=progress)
        first = [dataclasses.replace(a, arrival_s=0.0) for a in arrivals[:NUM_PROBES]]
        prompts = _prompts(lm, first, setup)
        records = drive(
            server,
            first,
            prompts,
            temperature=setup.temperature,
            progress=progress,
        )
        acceptance = speculation.measured(
            records, config.length, is_tree=config.is_tree
        )
    return Profile(
        costs=costs,
        acceptance=acceptance,
        prefill_chunk=setup.prefill_chunk,
        strategy=config.name,
        plain=plain,
    )


def serve(
    lm: Any,
    strategy: Any,
    setup: Setup,
    profile: Profile,
    policy: str,
    progress: Progress = lambda *_: None,
) -> list[Record]:
    """The load on the real server, in real time.

    Raises:
        ValueError: the profile is of another strategy.
    """
    length = profile.acceptance.length
    if (profile.strategy, length) != (strategy.name, strategy.length):
        raise ValueError(
            f"the profile is of {profile.strategy!r} with {length} draft tokens, but "
            f"{strategy.name!r} with {strategy.length} is to be served; measure that, "
            "or add --simulate"
        )
    server = setup.server(lm, config_of(strategy, setup, profile), policy)
    server.limit_drafts(profile.rule(setup.speculation))
    arrivals = setup.draw()
    prompts = _prompts(lm, arrivals, setup)
    # What the host compiles for a first request is no latency of the load.
    first = dataclasses.replace(arrivals[0], arrival_s=0.0)
    drive(server, [first], prompts[:1], temperature=setup.temperature)
    return drive(
        server, arrivals, prompts, temperature=setup.temperature, progress=progress
    )


def imitate(
    setup: Setup,
    profile: Profile,
    policy: str,
    *,
    num_replicas: int = 1,
    route: str = "least_loaded",
    kind: str | None = None,
    progress: Progress = lambda *_: None,
) -> list[Record]:
    """The load on the simulated clock; `kind` overrides `Setup.speculation`."""
    if profile.prefill_chunk != setup.prefill_chunk:
        raise ValueError(
            f"the profile was measured with a prefill chunk of {profile.prefill_chunk} "
            f"tokens, but {setup.prefill_chunk} were asked for; use the same"
        )
    return simulate(
        setup.draw(),
        find_policy(policy),
        setup.limits,
        profile.costs,
        acceptance=profile.acceptance,
        seed=setup.traffic.seed,
        draft_limit=profile.rule(setup.speculation if kind is None else kind),
        num_replicas=num_replicas,
        route=route,
        progress=progress,
    )


def sweep(
    setup: Setup,
    profile: Profile,
    rates: Sequence[Number],
    *,
    num_replicas: int = 1,
    route: str = "least_loaded",
    progress: Progress = lambda *_: None,
) -> list[dict[str, Any]]:
    """Figures of many loads on the simulated clock, under the first policy.

    Each load has requests enough for every slot to be used several times over, up to
    `MOST_SWEPT`. Without drafts only plain decoding is looked at.

    Returns:
        Of each rate: ``rate``, and the figures of each of `SPECULATION`, and of plain
        decoding on a server without a drafter, if it was measured.
    """
    drafts = profile.acceptance.length > 0
    servers = dict.fromkeys(SPECULATION if drafts else ("off",), profile)
    if profile.plain is not None:
        servers["plain"] = profile.without_drafter()
    num = max(setup.traffic.num_requests, 8 * setup.num_slots * num_replicas)
    found = []
    for index, rate in enumerate(rates):
        traffic = dataclasses.replace(
            setup.traffic, rate=rate, num_requests=min(num, MOST_SWEPT)
        )
        part = dataclasses.replace(setup, traffic=traffic)
        point: dict[str, Any] = {"rate": rate}
        for place, (kind, served) in enumerate(servers.items()):
            text = f"{rate:g} requests/s, {kind}"
            progress(index * len(servers) + place, len(rates) * len(servers), text)
            records = imitate(
                part,
                served,
                setup.policies[0],
                num_replicas=num_replicas,
                route=route,
                kind="off" if kind == "plain" else kind,
            )
            point[kind] = figures([records], setup.objective, bound_ms(served)[0])
        found.append(point)
    return found


def bound_ms(profile: Profile) -> tuple[float | None, str | None]:
    """The bound on token gaps in ms; or None, and why there is none."""
    try:
        return 1000 * token_gap_bound(profile.costs), None
    except ValueError as error:
        return None, f"no bound on token gaps holds: {error}"


def figures(
    runs: Sequence[Sequence[Record]], objective: Objective, bound: float | None
) -> dict[str, Any]:
    """The figures of one or several runs together, with the bound on token gaps."""
    records = [record for run in runs for record in run]
    found: Latency = summarise(records, objective, sum(span(run) for run in runs))
    return dataclasses.asdict(found) | {"token_gap_bound_ms": bound}


def agreement(
    real: Mapping[str, Any], simulated: Mapping[str, Any]
) -> dict[str, float | None]:
    """Real over simulated, of each figure in `COMPARED`."""

    def ratio(name: str) -> float | None:
        pair = real[name], simulated[name]
        return None if None in pair or not pair[1] else pair[0] / pair[1]

    return {name: ratio(name) for name in COMPARED}


def timeline(records: Sequence[Record], num_bins: int = 40) -> list[dict[str, float]]:
    """Draft tokens of a request's step over time: the mean of every bin with steps."""
    bursts = [burst for record in records for burst in record.bursts]
    if not bursts:
        return []
    start = min(record.arrival_s for record in records)
    width = max(span(records), 1e-9) / num_bins
    bins: dict[int, list[int]] = {}
    for burst in bursts:
        place = min(int((burst.time_s - start) / width), num_bins - 1)
        bins.setdefault(place, []).append(burst.num_drafted)
    return [
        {"time_s": (place + 0.5) * width, "draft_length": math.fsum(n) / len(n)}
        for place, n in sorted(bins.items())
    ]


def _prompts(lm: Any, arrivals: Sequence[Arrival], setup: Setup) -> list[list[int]]:
    lengths = [arrival.prompt_length for arrival in arrivals]
    return prompts_of(lm, lengths, setup.traffic.seed)
