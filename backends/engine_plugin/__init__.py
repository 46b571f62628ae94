"""What the drafters inside inference engines share: settings, tenants, recording, and what an engine must offer."""
