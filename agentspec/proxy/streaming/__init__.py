"""How the events of a stream are paced."""
