"""Several processes that serve one port: the parent, the workers, and the process of the local engine."""
