"""Mutation tests of the modules whose numbers nobody checks by eye: `python -m benchmarks.mutation`."""
