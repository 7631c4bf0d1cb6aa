"""A box with a supervisor of ours inside: what the backends that run one have in common."""
