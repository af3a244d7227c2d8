"""What an operator may put before and after the model: docs/hooks.md."""
