"""Structured output: what a caller asks, what is refused, and the matchers of the engine."""
