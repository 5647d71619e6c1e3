# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Many requests
#
# **What happens to the slowest tokens when many requests come at once, and what can
# scheduling do about it?**
#
# A server runs several requests in the *slots* of one compiled step. New prompts are
# read a *chunk* at a time between two steps, so nobody who is being answered waits for
# a whole prompt. Two figures matter: *throughput*, and the *P99 of token gaps*, the
# wait between two tokens that 99 of 100 waits do not exceed.

# %%
import importlib.util

if importlib.util.find_spec("jaxdec") is None:
    # From the clone that this notebook is in; on Colab, clone it and %cd to colab/.
    get_ipython().run_line_magic("pip", "install -q '..[plots]'")

from jaxdec import course, load_run

lesson = course.start()
lm = lesson.lm
lesson

# %% [markdown]
# ## What the work takes
#
# First the server is measured: a step with one, two, ... running requests and with
# shorter or longer drafts, and a chunk of a prompt. The strategy is lookup.

# %%
strategy = lesson.strategy("lookup", length=4)
setup = lesson.setup()
profile = load_run.measure(lm, strategy, setup)
lengths = course.length_table(profile)
lengths

# %% [markdown]
# A draft pays while a step waits for the weights. The more requests share a step, the
# more each draft token costs, and the shorter the best draft: down to none.

# %%
course.draw_lengths(lengths)

# %% [markdown]
# ## A load
#
# Requests come at random times (a Poisson process), at two thirds of the rate that this
# device can carry.

# %%
most = course.max_rate(setup, profile)
busy = course.at_rate(setup, most * 2 / 3)
print(f"this device carries about {most:.2f} requests per second")

# %% [markdown]
# The same load twice: on the real server, and on a *simulated clock*, where the same
# scheduler runs with the measured times and no model.

# %%
real = load_run.serve(lm, strategy, busy, profile, "first_come")
simulated = load_run.imitate(busy, profile, "first_come")
runs = {"real server": real, "simulated clock": simulated}
course.draw_gaps(runs, profile, "gaps between tokens of a request")

# %% [markdown]
# Steps are the curve's steep part; gaps in which a chunk of somebody's prompt was read
# are its tail. The dashed line is the bound: one chunk and one step, with some slack.
# It needs no statistics, only the two times.

# %%
course.draw_requests(real, "first come, first served")

# %%
course.latency_table(runs, profile)

# %% [markdown]
# ## Whose turn is it?
#
# When more requests wait than there are slots, a *policy* says who is next. First come,
# first served is fair; *shortest remaining* lets short answers pass; *deadline* takes
# the earliest deadline first (nobody has one here, so it is as the first).

# %%
crowd = course.at_rate(setup, most * 3)
queues = {
    policy: load_run.imitate(crowd, profile, policy)
    for policy in ("first_come", "shortest_remaining", "deadline")
}
course.latency_table(queues, profile)

# %%
course.draw_requests(queues["shortest_remaining"], "shortest remaining first")

# %% [markdown]
# ## Loads that this machine cannot carry
#
# The simulated clock goes on where the server cannot. *Fixed* always drafts the whole
# length, *off* never, and *scheduled* asks the table above; *plain* is a server that
# has no drafter at all.

# %%
rates = [most * share for share in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)]
sweep = load_run.sweep(setup, profile, rates)
course.draw_sweep(sweep, load_run.bound_ms(profile)[0])

# %% [markdown]
# Above the rate that the device can carry, throughput stays and the wait for the first
# token grows without end. The gaps of those who have a slot stay below the bound.
#
# ## The answer
#
# Load lengthens the wait for a slot without end; gaps grow only up to the bound, which
# a chunk and a step decide. Drafts are worth most at low load, and a scheduler shortens
# them when they are not.

# %%
answer = course.sweep_table(sweep)
answer

# %% [markdown]
# ## Exercises
#
# **1.** Three requests wait for one slot and have 100, 5 and 20 tokens to say. In which
# order is the mean time to their last token least? Answer with the three numbers.

# %%
order = None  # your answer
course.check_order(order)

# %% [markdown]
# **2.** A chunk takes `chunk_ms`, a step `step_ms`. What is the longest gap between two
# tokens of a running request?


# %%
def bound(chunk_ms, step_ms):
    return None  # your answer


course.check_gap_bound(bound)

# %% [markdown]
# **3.** Write P99: the gap that 99 of 100 gaps of a list do not exceed.


# %%
def p99(gaps):
    return None  # your answer


course.check_percentile(p99)
