"""Training of drafters: what the target said, its features, objectives, one loop."""
