"""The fake backend: no torch, no model, deterministic."""

from headrace.backends.fake.model import reference
from headrace.backends.fake.runner import FakeRunner

__all__ = ["FakeRunner", "reference"]
