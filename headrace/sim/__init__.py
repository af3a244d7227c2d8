"""A fleet on a virtual clock: the gateway's policies over modelled workers."""
