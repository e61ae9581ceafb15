"""What makes a one-run generator follow the data? Ideas, each a small function, tried on the same small world.

`python -m benchmarks.ideas` measures them; docs/decisions/0010-generators-that-follow-the-data.md says what came of it.
"""
