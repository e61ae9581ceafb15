"""The commands for one's own files: fit, predict, evaluate, next. One file each; options with `run()`."""
