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
# # 6. One budget for every proposal
#
# **How many draft tokens is a step worth, and when is the answer: none?**
#
# Drafters differ in where candidates come from. What they cost and bring is counted the
# same way for all:
#
#     time per token = (drafting + verifying + the rest of the round) / tokens of a step
#
# *Net benefit* is the share of plain decoding's time per token that is saved. It can be
# negative.

# %%
import importlib.util

if importlib.util.find_spec("jaxdec") is None:
    # From the clone that this notebook is in; on Colab, clone it and %cd to colab/.
    get_ipython().run_line_magic("pip", "install -q '..[plots]'")

import jaxdec
from jaxdec import course

lesson = course.start("eagle3")
lm = lesson.lm
lesson

# %% [markdown]
# ## Three proposers
#
# *Lookup* copies what followed the last tokens earlier on, and costs next to nothing.
# *Self-drafting* uses the first layers of the target itself. *EAGLE-3* has been
# trained. One prompt, so that times are those of a single request.

# %%
proposers = {
    "lookup": jaxdec.lookup(length=6),
    "self_draft": jaxdec.self_draft(max(lm.config.num_layers // 4, 1), length=4),
    "eagle3": lesson.strategy("eagle3", length=5),
}
options = dict(max_new_tokens=lesson.max_new_tokens, stop_tokens=())
plain = jaxdec.generate(lm, lesson.prompts[:1], **options)
runs = {
    name: jaxdec.generate(lm, lesson.prompts[:1], strategy=strategy, **options)
    for name, strategy in proposers.items()
}
course.counts_table({"plain": plain, **runs})

# %% [markdown]
# ## What a round costs
#
# A round drafts, and then the target reads the anchor and the draft in one forward. For
# plain decoding that forward reads the anchor alone.

# %%
course.costs_table({"plain": plain, **runs})

# %% [markdown]
# ## Net benefit by draft length
#
# Acceptance by position, and the costs, predict the time per token at every shorter
# length. Length 0 is plain decoding.

# %%
plain_ms = course.evidence_of(plain).tpot_ms
measured = {name: course.measure_budget(run, plain) for name, run in runs.items()}
budgets = {name: course.budget_table(m, plain_ms) for name, m in measured.items()}
course.draw_budget(budgets)

# %%
budgets["eagle3"]

# %% [markdown]
# ## Break-even
#
# With the costs of this machine: which acceptance would a draft need? The line is
# break-even; green is gain. The star is what was measured. The same drafter can be on
# one side of the line on a CPU and on the other side on an accelerator.

# %%
course.draw_break_even(measured["eagle3"], plain_ms)

# %%
course.draw_break_even(measured["self_draft"], plain_ms)

# %% [markdown]
# ## The answer
#
# Make drafts longer as long as the next token brings more than it costs. Where no
# length has a net benefit, turn drafting off.

# %%
answer = course.break_even_table(measured, plain_ms)
answer

# %% [markdown]
# ## Exercises
#
# **1.** A round takes `round_ms` and judges `length` draft tokens; plain decoding takes
# `plain_ms` a token. Which acceptance rate breaks even?


# %%
def needed(round_ms, plain_ms, length):
    return None  # your answer


course.check_break_even(needed)

# %% [markdown]
# **2.** Drafting takes 2 ms a token, verifying 30 ms for any length, plain decoding
# 28 ms a token. Each draft token is accepted with probability 0.7 if the one before it
# was. Which draft length is best?

# %%
best = None  # your answer
course.check_best_length(best)

# %% [markdown]
# **3.** Which draft length does your own table speak for, for EAGLE-3?

# %%
own_best = None  # your answer
course.check_own_best_length(own_best, budgets["eagle3"])
