"""How the chunks of a stream are sent as events."""
