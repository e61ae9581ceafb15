"""The studies of the paper, the commands that run them and show their results, and baselines that only they use."""
