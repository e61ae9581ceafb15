"""Fuzzing: random tables, model folders, images, checkpoints and calls, with a classification of what happens."""
