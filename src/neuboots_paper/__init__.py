"""One file an experiment: a frozen dataclass of options whose `run()` measures, prints and draws."""
