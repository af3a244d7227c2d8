"""Stage 1: one front for many workers. Its own process, without torch."""
