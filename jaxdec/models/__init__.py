"""Target models: one decoder with static switches, as pure functions."""
