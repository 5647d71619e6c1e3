"""Drafters as they are found on disk, in every format that is in circulation."""
