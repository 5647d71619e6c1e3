"""What proposes: one file per method, each `init`, `extend` and `propose`.

A step has two parts that know nothing of each other: a drafter proposes, an acceptance
rule judges. The classics are pairs of the two.

    method                     drafter       rule
    autoregressive decoding    none          match
    prompt lookup              lookup        match
    speculative sampling       draft_model   rejection, or match with shared noise
    early-exit drafting        draft_model over the target's first layers
    multi-token prediction     mtp           match or rejection
    EAGLE, chain; P-EAGLE      eagle         match or rejection
    EAGLE-2, dynamic tree      recurrent_tree over a network of EAGLE or MTP; match
    DFlash                     dflash        match (as released, greedy), or rejection
    DSpark                     dspark        rejection, or match with shared noise
    mixtures                   first_of      match

`extend` learns what a step (or a prefill chunk) made permanent, as a `Commit` that
pairs each token read with the token that followed it; `propose` drafts from there. A
drafter never sees the target, and the engine never asks what kind of drafter it has.
"""
