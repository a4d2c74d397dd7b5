"""Benchmarks: every claim about speed, measured beside its baselines in one run. ``python -m fastcollab.bench``."""
