"""Reading a request's body: its bytes, its JSON, and which of its fields an upstream may get."""
