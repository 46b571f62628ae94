"""The gateway under load, between two processes that speak HTTP over plain sockets and report their own time apart."""
