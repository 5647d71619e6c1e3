"""What a step costs, measured or compiled ahead of time, and when it pays."""
