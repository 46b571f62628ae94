"""The page of the gateway below /ui: its files, and the data that its views show."""
