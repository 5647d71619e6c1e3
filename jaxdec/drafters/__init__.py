"""What proposes: one file per method, each `init`, `extend` and `propose`."""
