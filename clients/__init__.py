"""Programs that use the server as anyone would: over HTTP, with the openai SDK."""
