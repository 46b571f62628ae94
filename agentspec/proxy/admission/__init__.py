"""Which requests are admitted: the caller's key, the places of each tenant, and the time that a request may take."""
